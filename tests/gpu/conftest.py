"Tests that need a GPU: without one each is skipped, with a reason. `make gpu` runs them where there is one."
import os, re
import pytest, torch
from xtrain.kernels import backend, no_gpu
from . import helpers

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
    if not WHY: return f'{torch.cuda.get_device_name()}; kernels: %s (%s); random cases of XTRAIN_SEED={helpers.SEED}' % backend()


@pytest.fixture(autouse=True)
def memory_given_back():
    "What a test allocated is free for the next one; an error that a kernel left behind belongs to the test that made it"
    yield
    if not WHY: torch.cuda.synchronize(); torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def errors_shown(request):
    "What a test compared with torch, for the table at the end (a report carries it between processes)"
    helpers.errors.clear()
    yield
    if helpers.errors: request.node.user_properties.append(('errors', list(helpers.errors)))


def pytest_terminal_summary(terminalreporter):
    files = {}
    for r in terminalreporter.getreports(''):                                    # where a teardown that passed is counted
        for name, pairs in r.user_properties if getattr(r, 'when', '') == 'teardown' else ():
            if name == 'errors': files.setdefault(r.nodeid.split('::')[0].split('/')[-1], []).extend(pairs)
    if not files: return
    terminalreporter.write_sep('=', 'error against float64, ours and torch\'s at the same dtype')
    for f, pairs in sorted(files.items()):
        ours, torchs = (sorted(p[i] for p in pairs)[len(pairs)//2] for i in (0, 1))
        terminalreporter.write_line(f'{f:24} {len(pairs):5} comparisons, medians {ours:.2e} and {torchs:.2e}; ours is the smaller or equal in {sum(a <= b for a, b in pairs)/len(pairs):.0%}')
