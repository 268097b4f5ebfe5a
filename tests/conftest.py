"What every test shares: the checkout, no network for the Hugging Face libraries, signals that end a program, and torch left as it was found."
import os, signal, sys
from pathlib import Path
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT/'tools'))
os.environ.update(HF_HUB_OFFLINE='1', TOKENIZERS_PARALLELISM='false', MPLBACKEND='agg')
signal.signal(signal.SIGHUP, signal.SIG_DFL) # `nohup make test` has it ignored, and what the tests start would inherit that
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN: signal.signal(signal.SIGINT, signal.default_int_handler) # So has `make test &` in a script


@pytest.fixture(scope='session')
def root(): return ROOT


@pytest.fixture(autouse=True)
def torch_as_it_was():
    "A test that changes torch's global settings must not change the next test"
    torch = sys.modules.get('torch')
    if torch is None: yield; return
    dtype, threads, grad, fixed = torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_default_dtype(dtype); torch.set_grad_enabled(grad); torch.use_deterministic_algorithms(fixed)
    if torch.get_num_threads() != threads: torch.set_num_threads(threads)


def pytest_sessionstart(session):
    if not hasattr(session.config, 'workerinput'): (ROOT/'.pytest_cache'/'kernels.txt').unlink(missing_ok=True)


def pytest_terminal_summary(terminalreporter):
    "What the compiler said of the kernels, where test_kernels.py ran"
    f = ROOT/'.pytest_cache'/'kernels.txt'
    if f.exists(): terminalreporter.section('kernels'); terminalreporter.write(f.read_text())
