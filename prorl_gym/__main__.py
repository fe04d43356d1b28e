"""``python -m prorl_gym``: the prorl-gym command."""

from prorl_gym.cli.main import app

if __name__ == "__main__":
    app()
