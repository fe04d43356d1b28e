"""The document of the published routes is complete, and its examples are what is read and answered."""

from typing import Any

from compat_support import Published, process, published
from jsonschema import Draft202012Validator

from prorl_gym.api.compat import compat_examples


async def test_every_body_and_answer_has_an_example_that_fits() -> None:
    async with published() as server, server.http.get(server.url + "/docs") as response:
        document = await response.json()
    assert len(document["paths"]) == 7
    for path, item in document["paths"].items():
        for operation in item.values():
            assert operation["summary"], path
            assert operation["description"], path
            assert {"200", "401", "403", "500"} <= set(operation["responses"]), path
            contents = [answer["content"] for answer in operation["responses"].values()]
            contents += [operation["requestBody"]["content"]] if "requestBody" in operation else []
            for content in contents:
                [described] = content.values()
                schema = {**described["schema"], "components": document["components"]}
                validator: Any = Draft202012Validator(schema)
                validator.validate(described["example"])


async def test_answers_have_the_fields_of_their_examples() -> None:
    async with published() as server:
        _, result = await server.post("/process", process())
        answers: list[tuple[Any, Any]] = [
            (result, compat_examples.RESULT),
            (await server.status(), compat_examples.STATUS),
            ((await server.post("/cancel", {"job_id": await _ended(server)}))[1], compat_examples.CANCELLED),
            ((await server.post("/stop"))[1], compat_examples.STOPPED),
            ((await server.post("/start"))[1], compat_examples.STARTED),
            ((await server.post("/clear_llm_server"))[1], compat_examples.CLEARED),
            ((await server.post("/add_llm_server", {"address": "127.0.0.1:9001"}))[1], compat_examples.ADDED),
        ]
    for answer, example in answers:
        assert set(answer) == set(example)


async def _ended(server: Published) -> str:
    await server.post("/process", process("job"))
    return "job"
