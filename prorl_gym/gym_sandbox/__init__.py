# SPDX-FileCopyrightText: Copyright (c) 2026 the prorl-gym authors
# SPDX-License-Identifier: Apache-2.0

"""NeMo Gym's sandbox provider ``prorl``: our sandboxes under every agent and environment of Gym."""
