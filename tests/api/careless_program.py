"""An agent program: ``URL TOKEN ANSWER_FILE TASK WIRE HOW``. It goes on after every failure, as many do."""

import json
import sys
import urllib.request

url, token, answer_file, task, wire, how = sys.argv[1:]
PATHS = {"chat": "/v1/chat/completions", "messages": "/v1/messages"}


def call(messages):
    body = {"model": "policy", "max_tokens": 200, "messages": messages, "stream": how == "streamed"}
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    request = urllib.request.Request(url + PATHS[wire], json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        raw = answer.read().decode()
    if how != "streamed":
        said = json.loads(raw)
        return said["choices"][0]["message"]["content"] if wire == "chat" else said["content"][0]["text"]
    events = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: {")]
    if wire == "chat":
        return "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event.get("choices"))
    return "".join(event["delta"].get("text", "") for event in events if event.get("type") == "content_block_delta")


def ask(messages):
    for _ in range(4 if how == "retrying" else 1):
        try:
            return call(messages)
        except Exception as error:
            print(f"{type(error).__name__}: {error}", flush=True)
    return "I give up."


talk = [{"role": "user", "content": task}]
for _ in range(2):
    talk.append({"role": "assistant", "content": ask(talk)})
    talk.append({"role": "user", "content": "Go on."})
print(ask([{"role": "user", "content": "Say a title."}]))
with open(answer_file, "w", encoding="utf-8") as file:
    file.write(talk[-2]["content"])
