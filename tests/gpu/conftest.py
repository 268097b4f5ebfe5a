"Tests that need a GPU: without one each is skipped, with a reason. `make gpu` runs them where there is one."
import pytest, torch
from xtrain.kernels import backend, no_gpu

WHY = no_gpu()


def pytest_configure(config): config.addinivalue_line('markers', 'xdist_group(name): tests that pytest-xdist gives to one process')


def pytest_collection_modifyitems(items):
    for i in items:
        if WHY and 'tests/gpu' in i.path.as_posix(): i.add_marker(pytest.mark.skip(reason=f'no GPU: {WHY}'))


def pytest_report_header():
    if not WHY: return f'{torch.cuda.get_device_name()}; kernels: %s (%s)' % backend()


@pytest.fixture(autouse=True)
def memory_given_back():
    "What a test allocated is free for the next one; an error that a kernel left behind belongs to the test that made it"
    yield
    if not WHY: torch.cuda.synchronize(); torch.cuda.empty_cache()
