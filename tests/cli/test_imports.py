"""Commands that need no torch do not import it; and no command but plot imports matplotlib."""

from __future__ import annotations

import subprocess
import sys

from tests.cli.conftest import clean_environment

_COMMANDS = """
import os, sys
from click.testing import CliRunner
from ckptstore.cli.app import app
place = sys.argv[1]
def call(*args, stdin=None):
    result = CliRunner().invoke(app, ["-s", place, *args], input=stdin)
    assert result.exit_code == 0, (args, result.output)
call("query", "select * from v_checkpoints"); call("query", "select 1", "--csv")
call("query", "-", stdin="select 1")
call("diff", "gpt@10", "gpt@20"); call("diff", "gpt@10", "gpt@20", "--values")
call("du"); call("du", "gpt", "--scan"); call("ui", "--export", "pages")
call("export", "gpt@20", "m.safetensors", "--component", "model"); call("export", "gpt@20", "m.npz")
call("import", "m.safetensors", "base@0"); call("import", "m.npz", "base@1", "--no-component")
call("average", "gpt@10", "gpt@20", "-o", "mean@0")
call("completion", "zsh"); call("show", "-", stdin="gpt@10")
for name in ("plot", "export", "import", "ui"):
    call(name, "--help")
os.environ.update(_CKPTSTORE_COMPLETE="bash_complete", COMP_POINT="")
os.environ["COMP_LINE"] = f"ckptstore -s {place} show gpt@"
assert "paper" in CliRunner().invoke(app, [], prog_name="ckptstore").output
assert "torch" not in sys.modules
assert "matplotlib" not in sys.modules
"""


def test_only_what_needs_torch_imports_it(place, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", _COMMANDS, str(place)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=clean_environment(),
    )
    assert done.returncode == 0, done.stderr
