"""Agent programs that run unmodified: their versions, how they are installed and how they are started."""

import json
from collections.abc import Mapping
from dataclasses import replace

from prorl_gym.agents.command_config import CommandConfig
from prorl_gym.harness.layers import NpmLayer, Preset, PythonLayer

_CLAUDE_CODE = Preset(
    name="claude-code",
    version="2.1.330",
    wire="messages",
    layer=NpmLayer({"claude": "@anthropic-ai/claude-code-linux-{arch}@2.1.330"}),
    licence="Proprietary: installing it accepts Anthropic's terms.",
    command=CommandConfig(
        argv=(
            *("$layer/claude/claude", "-p", "$task", "--output-format", "json"),
            "--dangerously-skip-permissions",  # the sandbox is the boundary
        ),
        env={
            "ANTHROPIC_BASE_URL": "$url",
            "ANTHROPIC_AUTH_TOKEN": "$token",
            "ANTHROPIC_MODEL": "$model",
            "ANTHROPIC_SMALL_FAST_MODEL": "$model",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            "IS_SANDBOX": "1",  # it refuses to skip permissions as root otherwise
            # Without a billing text that changes, deferred tools and server-side edits of the context.
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS": "1",
        },
        side_calls=("you are a helpful ai assistant tasked with summarizing conversations",),
    ),
)

_CODEX_SETTINGS = """\
model = "$model"
model_provider = "gateway"
check_for_update_on_startup = false
web_search = "disabled"

[model_providers.gateway]
name = "gateway"
base_url = "$url/v1"
env_key = "GATEWAY_TOKEN"
wire_api = "responses"

[analytics]
enabled = false
"""

_CODEX = Preset(
    name="codex",
    version="0.169.0",
    wire="responses",
    layer=NpmLayer({"codex": "@openai/codex@0.169.0-linux-{arch}"}, {"codex": "vendor/{machine}-unknown-linux-musl"}),
    command=CommandConfig(
        argv=(
            *("$layer/codex/bin/codex", "exec", "--json", "--skip-git-repo-check"),
            "--dangerously-bypass-approvals-and-sandbox",  # the sandbox is the boundary
            "$task",
        ),
        env={"GATEWAY_TOKEN": "$token", "CODEX_HOME": "$home/.codex"},
        files={"$home/.codex/config.toml": _CODEX_SETTINGS},
    ),
)

_MINI_SWE_AGENT = Preset(
    name="mini-swe-agent",
    version="2.4.6",
    wire="chat completions",
    layer=PythonLayer(
        requirements=("mini-swe-agent==2.4.6", "mcp"),  # litellm imports mcp, and does not ask for it
        lock="mini_swe_agent.lock",
        pythons=("3.11", "3.12", "3.13"),
        check="minisweagent.run.mini",
    ),
    command=CommandConfig(
        argv=(
            *("$layer/python/bin/python3", "-I", "$layer/run.py", "minisweagent.run.mini"),
            *("-m", "openai/$model", "-t", "$task", "--yolo", "--exit-immediately", "-o", "$home/trajectory.json"),
        ),
        env={
            "OPENAI_API_BASE": "$url/v1",
            "OPENAI_API_KEY": "$token",
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_SILENT_STARTUP": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
        task=(
            "$prompt\n\nUse your bash tool in place of the ones that are named above. Where you are told to call "
            "finish, submit instead: the output of your last command is COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT in its "
            "first line, and below it your whole answer: $answer"
        ),
        answer_file="/home/agent/trajectory.json",
        answer_key=("info", "submission"),
    ),
)

_MINISWE_SANDBOXED_SETTINGS = {
    "agent": {"agent_class": "default", "step_limit": 0, "cost_limit": 0},  # the gateway counts turns
    "environment": {"environment_class": "local", "timeout": 600},
    "model": {
        "model_class": "litellm_response",
        "model_name": "openai/$model",
        "cost_tracking": "ignore_errors",
        "model_kwargs": {"api_base": "$url/v1", "api_key": "$token", "drop_params": True, "parallel_tool_calls": True},
    },
}

# NeMo Gym's ``miniswe_sandboxed_agent``: mini-swe-agent as it sets it up.
_MINISWE_SANDBOXED = replace(
    _MINI_SWE_AGENT,
    name="miniswe-sandboxed",
    wire="responses",
    layer_of=_MINI_SWE_AGENT.name,
    command=_MINI_SWE_AGENT.command.model_copy(
        update={
            "argv": (
                *("$layer/python/bin/python3", "-I", "$layer/run.py", "minisweagent.run.mini"),
                *("-c", "mini.yaml", "-c", "$home/gym.yaml", "-t", "$task", "-o", "$home/trajectory.json"),
            ),
            "env": {"MSWEA_CONFIGURED": "true", "MSWEA_SILENT_STARTUP": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
            "files": {"$home/gym.yaml": json.dumps(_MINISWE_SANDBOXED_SETTINGS)},
        }
    ),
)

_OPENCODE_SETTINGS = {
    "autoupdate": False,
    "share": "disabled",
    "snapshot": False,
    "permission": "allow",  # the sandbox is the boundary
    "model": "gateway/$model",
    "small_model": "gateway/$model",
    "provider": {
        "gateway": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": "$url/v1", "apiKey": "$token"},
            # It compacts its history by these and the reported usage.
            "models": {"$model": {"limit": {"context": 65536, "output": 8192}}},
        }
    },
}

_OPENCODE = Preset(
    name="opencode",
    version="1.18.33",
    wire="chat completions",
    # The baseline build runs on processors without AVX2.
    layer=NpmLayer({"opencode": "opencode-linux-{arch}-baseline@1.18.33"}),
    command=CommandConfig(
        argv=("$layer/opencode/bin/opencode", "run", "--format", "json", "$task"),
        env={
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        },
        files={"$home/.config/opencode/opencode.json": json.dumps(_OPENCODE_SETTINGS)},
        side_calls=("you are a title generator", "you are a context summarization agent"),
    ),
)

_OPENHANDS = Preset(
    name="openhands",
    version="1.16.0",
    wire="chat completions",
    layer=PythonLayer(
        requirements=("openhands==1.16.0",),
        lock="openhands.lock",
        pythons=("3.12",),
        check="openhands_cli.entrypoint",
    ),
    command=CommandConfig(
        argv=(
            *("$layer/python/bin/python3", "-I", "$layer/run.py", "openhands_cli.entrypoint"),
            *("--headless", "--json", "--yolo", "--override-with-envs", "-t", "$task"),
        ),
        env={
            "LLM_MODEL": "openai/$model",
            "LLM_BASE_URL": "$url/v1",
            "LLM_API_KEY": "$token",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "OPENHANDS_SUPPRESS_BANNER": "1",
        },
    ),
)

_QWEN_CODE = Preset(
    name="qwen-code",
    version="0.24.4",
    wire="chat completions",
    layer=NpmLayer(
        {
            "node": "node-linux-{arch}@22.23.3",
            "qwen": "@qwen-code/qwen-code@0.24.4",
            # Without a terminal for its commands it loses the output of short ones at times.
            "qwen/node_modules/@lydell/node-pty": "@lydell/node-pty@1.2.0-beta.10",
            "qwen/node_modules/@lydell/node-pty-linux-{arch}": "@lydell/node-pty-linux-{arch}@1.2.0-beta.10",
        }
    ),
    command=CommandConfig(
        argv=(
            *("$layer/node/bin/node", "$layer/qwen/cli.js", "-p", "$task", "--yolo"),
            *("--auth-type", "openai", "--output-format", "json"),
        ),
        env={"OPENAI_BASE_URL": "$url/v1", "OPENAI_API_KEY": "$token", "OPENAI_MODEL": "$model"},
        side_calls=("you are the component that summarizes a conversation",),
    ),
)

PRESETS: Mapping[str, Preset] = {
    preset.name: preset
    for preset in (_CLAUDE_CODE, _CODEX, _MINI_SWE_AGENT, _MINISWE_SANDBOXED, _OPENCODE, _OPENHANDS, _QWEN_CODE)
}
