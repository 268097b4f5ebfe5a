"repeat_kv on a GPU: a copy that is exact, a sum whose order is written down; any memory, any group, compiled, captured, beyond 2^31 elements."
import random

import pytest, torch

from xtrain.kernels import kernels
from xtrain.ops.repeat_kv import repeat_kv, repeat_kv_grad, repeat_kv_ref
from .helpers import BF16, DTYPES, F32, SEED, no_larger

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason='no GPU')
cuda = dict(device='cuda')


@pytest.fixture(autouse=True)
def seeded(): torch.manual_seed(0)


@pytest.fixture(scope='module')
def ns():
    ns = kernels('repeat_kv') if torch.cuda.is_available() else None
    if ns is None: pytest.skip('the kernels cannot be had here')
    return ns


def make(shape, dtype, layout):
    B, H, S, D = shape
    if layout == 'turned': return torch.randn(B, S, H, D, **cuda).to(dtype).transpose(1, 2)
    if layout == 'offset': return torch.randn(B*H*S*D+1, **cuda).to(dtype)[1:].view(shape)
    if layout == 'sliced': return torch.randn(B, H, S+2, D, **cuda).to(dtype)[:, :, 1:-1]
    if layout == 'expanded': return torch.randn(D, **cuda).to(dtype).expand(shape)
    return torch.randn(shape, **cuda).to(dtype)


LAYOUTS = ['dense', 'turned', 'offset', 'sliced', 'expanded']
CASES = [((rng.choice([1, 2, 3]), rng.choice([1, 2, 5]), rng.choice([1, 7, 64, 130]), rng.choice([1, 3, 8, 64, 128])), rng.choice([1, 2, 3, 4, 5, 7, 8, 12]), rng.choice(DTYPES), rng.choice(LAYOUTS), rng.choice(LAYOUTS), rng.randrange(10**6))
         for rng in [random.Random(SEED)] for _ in range(80)]

@pytest.mark.parametrize('shape,group,dtype,lx,lg,seed', CASES)
def test_random(ns, shape, group, dtype, lx, lg, seed):
    torch.manual_seed(seed)
    B, H, S, D = shape
    x, g = make(shape, dtype, lx).detach().requires_grad_(), make((B, H*group, S, D), dtype, lg)
    y = repeat_kv(x, group)
    assert torch.equal(y, x.repeat_interleave(group, 1))
    dx, = torch.autograd.grad(y, x, g)
    assert torch.equal(dx, repeat_kv_grad(g, group))                             # bit for bit what the CPU says: in pairs, in float32, rounded once
    assert torch.equal(dx.cpu(), repeat_kv_grad(g.cpu(), group))
    x64 = x.detach().double().requires_grad_()
    want, = torch.autograd.grad(x64.repeat_interleave(group, 1), x64, g.double())
    theirs, = torch.autograd.grad(x.repeat_interleave(group, 1), x, g)
    if want.norm() > 0: no_larger(dx, theirs, want)


def test_head_mapping_six_on_two(ns):
    v = torch.tensor([1., 2.], **cuda).view(1, 2, 1, 1)
    assert ns.repeat_kv(v, 3).flatten().tolist() == [1, 1, 1, 2, 2, 2]
    assert ns.repeat_kv_backward(torch.arange(6., **cuda).view(1, 6, 1, 1), 3).flatten().tolist() == [3, 12]


def problem(dtype, shape=(2, 3, 33, 64), group=4):
    B, H, S, D = shape
    return torch.randn(shape, **cuda).to(dtype).requires_grad_(), torch.randn(B, H*group, S, D, **cuda).to(dtype), group
def run(f, x, g, group):
    y = f(x, group)
    return y, *torch.autograd.grad(y, x, g)


@pytest.mark.parametrize('dtype', DTYPES)
def test_opcheck(ns, dtype):
    x, g, group = problem(dtype)
    torch.library.opcheck(ns.repeat_kv, (x, group))
    torch.library.opcheck(ns.repeat_kv_backward, (g, group))


@pytest.mark.parametrize('dtype', DTYPES)
def test_a_hundred_runs_and_poisoned_memory(ns, dtype):
    x = problem(dtype)
    torch.use_deterministic_algorithms(True)
    try:
        first = run(repeat_kv, *x)
        assert all(t.isfinite().all() for t in first)
        for _ in range(100): assert all(map(torch.equal, first, run(repeat_kv, *x)))
    finally: torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize('dtype', DTYPES)
def test_compiled(ns, dtype):
    torch._dynamo.reset()
    f = torch.compile(repeat_kv, fullgraph=True)
    for shape in ((2, 3, 33, 64), (2, 3, 33, 64), (1, 3, 20, 64)):
        x = problem(dtype, shape)
        for a, b in zip(run(f, *x), run(repeat_kv, *x)): assert torch.equal(a, b)


def test_cuda_graph(ns):
    x = problem(BF16)
    side = torch.cuda.Stream(); side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3): run(repeat_kv, *x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph): out = run(repeat_kv, *x)
    with torch.no_grad():
        for t in x[:2]: t.copy_(torch.randn_like(t))
    graph.replay()
    assert all(map(torch.equal, out, run(repeat_kv, *x)))


def test_empty_group_one_stream_device(ns):
    for shape in ((0, 2, 5, 8), (1, 0, 5, 8), (1, 2, 0, 8), (1, 2, 5, 0)):
        x = torch.empty(shape, **cuda, requires_grad=True)
        y = repeat_kv(x, 3); y.sum().backward()
        assert y.shape == (shape[0], shape[1]*3, *shape[2:]) and x.grad.shape == shape
    x = problem(F32)
    assert repeat_kv(x[0], 1) is x[0]
    want, s = run(repeat_kv, *x), torch.cuda.Stream()
    s.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(s): got = run(repeat_kv, *x)
    s.synchronize()
    assert all(map(torch.equal, got, want))
    if torch.cuda.device_count() > 1:
        a = torch.randn(1, 2, 5, 8, device='cuda:1')
        assert torch.equal(repeat_kv(a, 3), repeat_kv_ref(a, 3))


def test_nothing_waits_for_the_gpu(ns):
    x = problem(BF16); run(repeat_kv, *x); torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode('error')
    try: run(repeat_kv, *x)
    finally: torch.cuda.set_sync_debug_mode('default')


def test_bad_arguments_are_named(ns):
    x = torch.ones(1, 2, 3, 4, **cuda)
    for bad, word in [(lambda: repeat_kv(x[0], 2), 'x must have shape'), (lambda: repeat_kv(x, 0), 'group must'), (lambda: repeat_kv(x, 1.5), 'group must'), (lambda: repeat_kv(x.int(), 2), 'x must be floating')]:
        with pytest.raises(ValueError, match=word): bad()


def test_second_derivative_refused(ns):
    x = torch.randn(1, 2, 3, 4, **cuda, requires_grad=True)
    g, = torch.autograd.grad(repeat_kv(x, 3).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError): torch.autograd.grad(g.sum(), x)


def test_beyond_31_bits(ns):
    "Two KV heads, four query heads each; the last head lies beyond 2^31 elements"
    torch.cuda.empty_cache()
    x = torch.empty(1, 2, 1 << 21, 136, **cuda, dtype=BF16).normal_()
    assert 8*x[0, 0].numel() > 2**31
    y = ns.repeat_kv(x, 4)
    assert all(torch.equal(y[0, h, -3:], x[0, h//4, -3:]) and torch.equal(y[0, h, :3], x[0, h//4, :3]) for h in range(8))
    dx = ns.repeat_kv_backward(y, 4)
    assert torch.equal(dx[:, :, -3:], ns.repeat_kv_backward(y[:, :, -3:].contiguous(), 4)) and torch.equal(dx, 4*x)
