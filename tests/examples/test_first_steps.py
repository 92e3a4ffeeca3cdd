"""The notebook: its cells run in order, and it is stored with what they print."""

import contextlib
import io
import json
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "first_steps.ipynb"


def test_its_cells_run_and_print_what_is_stored():
    notebook = json.loads(EXAMPLE.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == [1, 2, 3, 4]
    names: dict[str, object] = {}
    for cell in code:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile("".join(cell["source"]), EXAMPLE.name, "exec"), names)
        stored = [
            "".join(output["text"])
            for output in cell["outputs"]
            if output["output_type"] == "stream"
        ]
        assert printed.getvalue() == "".join(stored)
    assert len(notebook["cells"]) > len(code)
    assert "image/png" in code[-1]["outputs"][0]["data"]
