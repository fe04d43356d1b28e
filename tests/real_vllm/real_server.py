"""One real vLLM server as a child process, and the questions that only its development routes answer."""

import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from prorl_gym.free_ports import free_ports

CONTEXT = 8192
VOCAB = 4096
MODEL = "m"
_START_SECONDS = 240
_FLAGS = (
    *("--served-model-name", MODEL, "--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager"),
    *("--max-num-seqs", "32", "--max-logprobs", str(VOCAB)),
    # On CPU, vLLM 0.32 dies of a seeded call whose prompt it computes in pieces ("CPU Generator does not use offset").
    "--no-enable-chunked-prefill",
    *("--enable-prompt-tokens-details", "--logprobs-mode", "processed_logprobs", "--disable-uvicorn-access-log"),
)
_SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


class RealServer:
    """Started at once; ``wait`` for it. Ends with ``stop``, or suddenly with ``kill``."""

    def __init__(self, python: str, checkpoint: Path, home: Path, context: int = CONTEXT):
        self._log = home / "log"
        self._home = home
        home.mkdir(parents=True, exist_ok=True)
        (self._port,) = free_ports(1)
        self.root = f"http://127.0.0.1:{self._port}"
        self.url = f"{self.root}/v1"
        # setpriv: it ends with the tests also where these are killed, and takes its engine and workers along.
        command = [
            "setpriv",
            "--pdeathsig",
            "TERM",
            python,
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            str(checkpoint),
            *_FLAGS,
            *("--max-model-len", str(context), "--max-num-batched-tokens", str(max(8192, context))),
        ]
        keep = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "PYTHON", "HF_"))}
        own = {"VLLM_CACHE_ROOT": str(home / "cache"), "VLLM_CONFIG_ROOT": str(home / "config")}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, "--port", str(self._port)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=keep | _SETTINGS | own,
                cwd=home,
                start_new_session=True,  # its engine and workers are processes too, and go with it
            )

    @property
    def alive(self):
        return self._process.poll() is None

    @property
    def well(self):
        return self.alive and self._ready()

    def wait(self):
        """Return when it answers, and has answered once: the first answer takes some ten seconds."""
        until(self._ready, _START_SECONDS, self._died)
        self.post("/v1/completions", {"model": MODEL, "prompt": [5, 6], "max_tokens": 2, "prompt_logprobs": 1})

    def post(self, path: str, body: object = None, timeout: float = 60) -> Any:
        """Return the parsed answer; an HTTP error raises."""
        data = b"" if body is None else json.dumps(body).encode()
        ask = urllib.request.Request(self.root + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(ask, timeout=timeout) as answer:
            payload = answer.read()
        return json.loads(payload) if payload else None

    def reload(self, checkpoint: Path):
        arguments = {"weights_path": str(checkpoint)}
        answer = self.post("/collective_rpc", {"method": "reload_weights", "kwargs": arguments})
        assert answer == {"results": [None]}, answer

    def metric(self, name):
        """Return a figure of the metrics page; 0 before the server has it."""
        with urllib.request.urlopen(f"{self.root}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))

    def running(self, count, *, sampling=False):
        """Return when so many calls are at work there; ``sampling``: and each has a token."""
        until(lambda: self.metric("vllm:num_requests_running") == count, 60, found=self._figures)
        if sampling:  # a step gives each of them one; the figure is at most a step late
            wanted = self.metric("vllm:generation_tokens_total") + 2 * count
            until(lambda: self.metric("vllm:generation_tokens_total") >= wanted, 60, found=self._figures)

    def _figures(self):
        return [self.metric(f"vllm:{name}") for name in ("num_requests_running", "generation_tokens_total")]

    def fresh(self, checkpoint: Path):
        """Put it back into the state it began in, with these weights."""
        self.post("/resume")
        self.post("/abort_requests", {"request_ids": []})
        self.running(0)
        self.reload(checkpoint)
        self.post("/update_weight_version", {"new_version": "default"})
        until(lambda: self.post("/reset_prefix_cache")["success"], 20)

    def kill(self):
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def stop(self):
        if self.alive:
            self._process.terminate()
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()

    def _ready(self):
        try:
            urllib.request.urlopen(f"{self.root}/health", timeout=5).close()
        except (urllib.error.URLError, OSError):
            return False
        return True

    def _died(self):
        if not self.alive:
            raise AssertionError(f"vLLM ended ({self._process.returncode}):\n{self._log.read_text()[-3000:]}")


def until(there, seconds, each=lambda: None, found=str):
    """Wait for another process's state: there is no event of it to wait for. ``found`` says what it is at the end."""
    end = time.monotonic() + seconds
    while not there():
        each()
        if time.monotonic() > end:
            raise TimeoutError(f"not within {seconds} s: {found()}")
        time.sleep(0.01)
