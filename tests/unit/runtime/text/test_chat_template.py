"""Tokenizer files and chat templates: transformers' semantics, refusals with codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runtime.engine.text import TemplateRenderer, load_tokenizer
from specctl.contract.diagnostics import DiagnosticError
from tests.tiny import write_json, write_tokenizer

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]


def code_of(caught: pytest.ExceptionInfo[DiagnosticError]) -> str:
    return caught.value.diagnostics[0].code


def with_template(directory: Path, template: str) -> Path:
    write_tokenizer(directory)
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"chat_template": template}
    write_json(path, config)
    write_json(directory / "config.json", {"model_type": "llama"})
    return directory


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "target").mkdir()
    return tmp_path / "target"


def test_tokenizer_is_read_or_missing_with_a_code(directory: Path) -> None:
    with pytest.raises(DiagnosticError) as caught:
        load_tokenizer(directory)
    assert code_of(caught) == "SD911"
    write_tokenizer(directory)
    assert load_tokenizer(directory).decode(load_tokenizer(directory).encode("ab c").ids) == "ab c"


def test_template_of_the_tokenizer_config_is_rendered(directory: Path) -> None:
    write_tokenizer(directory)
    write_json(directory / "config.json", {"model_type": "llama"})
    render = TemplateRenderer(directory)
    assert render.has_template
    assert render(MESSAGES) == "system: be brief\nuser: hi\nassistant: "


def test_template_file_is_rendered(directory: Path) -> None:
    write_tokenizer(directory)
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text())
    del config["chat_template"]
    write_json(path, config)
    write_json(directory / "config.json", {"model_type": "llama"})
    (directory / "chat_template.jinja").write_text("{{ messages[0]['content'] }}|{{ eos_token }}")
    assert TemplateRenderer(directory)(MESSAGES) == "be brief|</s>"


def test_no_template_is_a_code(directory: Path) -> None:
    render = TemplateRenderer(directory)
    render.warm()
    with pytest.raises(DiagnosticError) as caught:
        render(MESSAGES)
    assert code_of(caught) == "SD912"


@pytest.mark.parametrize(
    "template",
    [
        "{% if messages|length > 1 %}{{ raise_exception('no system role') }}{% endif %}",
        "{{ messages[0]['content'] + 1 }}",
    ],
    ids=["raise_exception", "type error"],
)
def test_a_template_that_refuses_is_a_code_with_its_reason(directory: Path, template: str) -> None:
    render = TemplateRenderer(with_template(directory, template))
    with pytest.raises(DiagnosticError) as caught:
        render(MESSAGES)
    assert code_of(caught) == "SD913"
    assert "the chat template refused the messages: " in caught.value.diagnostics[0].message


def test_the_template_does_not_depend_on_the_model_config(directory: Path) -> None:
    """What is wrong there is refused with its code when the model loads."""
    write_tokenizer(directory)
    wrong = {"model_type": "llama", "rope_scaling": {"rope_type": "linear"}}
    write_json(directory / "config.json", wrong)
    assert TemplateRenderer(directory)(MESSAGES).startswith("system: be brief")
