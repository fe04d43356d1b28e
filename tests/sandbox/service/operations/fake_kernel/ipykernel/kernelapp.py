"""A kernel on real sockets whose cells are run with the kernel itself at hand, as ``k``, and answer for themselves."""

import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import zmq
from jupyter_client.session import Session


class IPKernelApp:
    def __init__(self) -> None:
        self.kernel = self
        self.shell = SimpleNamespace(events=SimpleNamespace(register=lambda event, call: None))
        self.silent = int(os.environ.get("FAKE_SILENT", "0"))
        """Questions of the start whose answers are dropped, as if the subscription were not known yet."""

    @classmethod
    def instance(cls, config: object) -> "IPKernelApp":
        return cls()

    def initialize(self, argv: list[str]) -> None:
        if os.environ.get("FAKE_WORDS"):
            sys.exit(os.environ["FAKE_WORDS"])
        info = json.loads(Path(argv[1]).read_text())
        self.session = Session(key=info["key"].encode())
        context = zmq.Context()
        self.requests, self.iopub = context.socket(zmq.ROUTER), context.socket(zmq.PUB)
        if not os.environ.get("FAKE_UNBOUND"):
            self.requests.bind(f"ipc://{info['ip']}-{info['shell_port']}")
            self.iopub.bind(f"ipc://{info['ip']}-{info['iopub_port']}")

    def start(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        while True:
            self.who, self.asked = self.session.recv(self.requests, mode=0)
            if self.asked["msg_type"] == "execute_request":
                exec(self.asked["content"]["code"], {"k": self})
            elif self.silent:
                self.silent -= 1
                self.reply()
            else:
                self.done()

    def publish(self, kind: str, content: dict[str, Any], **options: Any) -> None:
        self.session.send(self.iopub, kind, content, **{"parent": self.asked, **options})

    def show(self, **forms: str) -> None:
        self.publish("display_data", {"data": {name.replace("_", "/"): value for name, value in forms.items()}})

    def reply(self, **content: Any) -> None:
        self.session.send(
            self.requests, "execute_reply", {"status": "ok", **content}, parent=self.asked, ident=self.who
        )

    def idle(self) -> None:
        self.publish("status", {"execution_state": "idle"})

    def done(self) -> None:
        self.reply()
        self.idle()
