"Tests that need a GPU: without one each is skipped, with a reason. `make gpu` runs them where there is one."
import os, re
import pytest, torch
from xtrain.kernels import backend, no_gpu

# Where there are several GPUs each process begins with another one, and still sees all: CUDA reads this when it is first asked
if (w := os.environ.get('PYTEST_XDIST_WORKER')) and (n := torch.cuda.device_count()) > 1:
    ids = [d for d in os.environ.get('CUDA_VISIBLE_DEVICES', '').split(',') if d] or list(map(str, range(n)))
    i = int(re.sub(r'\D', '', w))%n
    os.environ['CUDA_VISIBLE_DEVICES'] = ','.join(ids[i:]+ids[:i])

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
