# SPDX-FileCopyrightText: Copyright (c) 2026 the prorl-gym authors
# SPDX-License-Identifier: Apache-2.0

"""Configuration of the model server."""

from typing import Any

from nemo_gym.base_responses_api_model import BaseResponsesAPIModelConfig
from pydantic import ConfigDict, Field

from prorl_gym.gateway.model_call import GatewayOptions


class ProrlModelConfig(GatewayOptions, BaseResponsesAPIModelConfig):
    """Configuration of the model server: the gateway's options, and where the engines are."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    base_url: str | list[str]
    """Address of the engine, or of each of them; ends in ``/v1``."""
    api_key: str | None = None
    """Accepted, since every Gym model has one; engines that need a key get it through ``inference.api_key_env``."""
    tokenizer: str | None = None
    """See ``inference.tokenizer``; the model's name by default."""
    inference: dict[str, Any] = Field(default_factory=dict)
    """Further keys of the engine pool's configuration: ``engine``, ``chat_template``, ``attempts``, ..."""
