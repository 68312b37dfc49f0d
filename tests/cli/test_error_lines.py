"""Every command tells an error as train_qarl and the parsers of flags do: its name, "error:", what is wrong."""

import importlib

import pytest

COMMANDS = {  # module: flags, with {no} for a path that cannot be made
    "cli.ablate_objectives": ["--out", "{no}"],
    "cli.evaluate": ["{no}", "--tasks", "aime24", "--out", "{no}"],
    "cli.export": ["{no}", "--out", "{no}"],
    "cli.prepare_data": ["--out", "{no}"],
    "cli.report": ["{no}"],
    "data.reasoning_gym": ["--task", "chain_sum", "--out", "{no}"],
    "data.small_qwen3": ["{no}"],
    "data.smollm2": ["{no}"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_an_error_is_called_one(tmp_path, command):
    (tmp_path / "file").touch()
    no = str(tmp_path / "file" / "none")
    main = importlib.import_module(f"qarl_openrlhf.{command}").main
    with pytest.raises(SystemExit) as ended:
        main([word.format(no=no) for word in COMMANDS[command]])
    message = str(ended.value)
    assert message.startswith(f"{command.partition('.')[2]}: error: ") and no in message, message
