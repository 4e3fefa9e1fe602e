"""What commands say when something is wrong before they have begun."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import structlog
import yaml
from typer.testing import CliRunner

from tidemill import __version__
from tidemill.cli.main import app


def tidemill(*args: str, prelude: str = "") -> subprocess.CompletedProcess[str]:
    code = f"{prelude}\nimport sys\nsys.argv[1:] = {list(args)!r}\nfrom tidemill.cli.main import app\napp()"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture(autouse=True)
def logging() -> Iterator[None]:
    """Commands set up logging for their process; what ran here leaves it as it was."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


def test_version_and_crd() -> None:
    assert tidemill("--version").stdout.strip() == f"tidemill {__version__}"
    assert yaml.safe_load(tidemill("crd").stdout)["metadata"]["name"] == "variantautoscalings.llmd.ai"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["autoscaler", "--kubeconfig", "/nope"], "no cluster: kubeconfig '/nope' is no file"),
        (["autoscaler", "--actuation", "magic"], "'magic' is not one of metrics, scale"),
        (["autoscaler", "--metrics-source", "magic"], "'magic' is not one of prometheus, direct"),
        (["autoscaler", "--scrape-interval", "0s"], "'0s' must be above 0"),
        (["autoscaler", "--scrape-interval", "soon"], "must be a duration with a unit"),
        (
            ["autoscaler", "--leader-elect", "--leader-election-renew-deadline", "70s"],
            "must be below renew deadline",
        ),
        (["autoscaler", "--picker", "--workers 2"], "--workers is a matter of the whole process"),
        (["autoscaler", "--picker", "--pool-name a --endpoints b"], "give either a pool of the cluster or a file"),
        (["autoscaler", "--picker", "--drain-timeout soon"], "--drain-timeout: 'soon'"),
        (["autoscaler", "--picker", "--kubeconfig 'x"], "No closing quotation"),
        (["model-server", "--model", "m", "--preset", "x"], "is not one of"),
        (["model-server", "--model", "m", "--kv-blocks", "0"], "must be at least 1"),
        (["explain", "deploy/x"], "must be va/NAME"),
    ],
)
def test_errors_name_what_is_wrong(args: list[str], words: str) -> None:
    # In this process: starting one for each would take a second each.
    found = CliRunner().invoke(app, args)
    assert found.exit_code == 2
    assert found.exception is None or isinstance(found.exception, SystemExit)
    assert words in " ".join(found.output.replace("│", " ").split())


def test_a_production_install_says_what_the_demo_needs() -> None:
    found = tidemill("demo", prelude="import sys\nsys.modules['cel'] = None")
    assert (found.returncode, found.stderr.strip()) == (
        2,
        "tidemill: cel is missing: pip install 'tidemill[local]'",
    )


def test_the_autoscaler_does_not_load_the_simulated_rooms() -> None:
    code = (
        "import sys, tidemill.cli.autoscaler\n"
        "rooms = ('tidemill.local', 'tidemill.sim', 'cel', 'cryptography')\n"
        "print([m for m in sys.modules if m.startswith(rooms)])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"
