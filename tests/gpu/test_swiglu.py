"SwiGLU on a GPU: the kernels against float64 and torch, in any memory, compiled, captured, beyond 2^31 elements."
import random

import pytest, torch

from xtrain.gradcheck import rel_error
from xtrain.kernels import kernels
from xtrain.ops.swiglu import swiglu, swiglu_ref
from .helpers import BF16, DTYPES, F16, F32, SEED, no_larger

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason='no GPU')
cuda = dict(device='cuda')


@pytest.fixture(autouse=True)
def seeded(): torch.manual_seed(0)


@pytest.fixture(scope='module')
def ns():
    ns = kernels('swiglu') if torch.cuda.is_available() else None
    if ns is None: pytest.skip('the kernels cannot be had here')
    return ns


def make(shape, dtype, layout):
    n = torch.Size(shape).numel()
    if layout == 'turned' and len(shape) > 1: return torch.randn(*shape[:-2], shape[-1], shape[-2], **cuda).to(dtype).transpose(-1, -2)
    if layout == 'offset': return torch.randn(n+1, **cuda).to(dtype)[1:].view(shape)
    if layout == 'half': return torch.randn(*shape[:-1], 2*shape[-1], **cuda).to(dtype)[..., :shape[-1]]
    if layout == 'expanded': return torch.randn(shape[-1], **cuda).to(dtype).expand(shape)
    return torch.randn(shape, **cuda).to(dtype)


LAYOUTS = ['dense', 'turned', 'offset', 'half', 'expanded']
CASES = [(rng.choice([(1,), (7,), (8,), (3, 5), (64, 130), (2, 3, 1001), (17, 1, 33), (1000, 257)]), rng.choice(DTYPES), *(rng.choice(LAYOUTS) for _ in range(3)), rng.choice([1., 8.]), rng.randrange(10**6)) for rng in [random.Random(SEED)] for _ in range(80)]

@pytest.mark.parametrize('shape,dtype,lg,lu,ld,scale,seed', CASES)
def test_random(ns, shape, dtype, lg, lu, ld, scale, seed):
    torch.manual_seed(seed)
    a, u, d = make(shape, dtype, lg).mul(scale).requires_grad_(), make(shape, dtype, lu).detach().requires_grad_(), make(shape, dtype, ld)
    kept = a.detach().clone(), u.detach().clone(), d.clone()
    y, z = swiglu(a, u), swiglu_ref(a, u)
    a64, u64 = a.detach().double().requires_grad_(), u.detach().double().requires_grad_()
    want = swiglu_ref(a64, u64)
    for x, t, r in zip((y, *torch.autograd.grad(y, (a, u), d)), (z, *torch.autograd.grad(z, (a, u), d)), (want, *torch.autograd.grad(want, (a64, u64), d.double()))):
        assert x.dtype == dtype and x.shape == r.shape
        if x.numel() >= 256: no_larger(x, t, r)
        else: assert rel_error(x, r) <= 2*rel_error(t, r) + {F32: 3e-7, BF16: 3e-3, F16: 4e-4}[dtype]
    assert all(map(torch.equal, kept, (a, u, d)))


def test_far_out(ns):
    for dtype in DTYPES:
        a = torch.tensor([-1e4, -100., -20., 0., 20., 100., 1e4], **cuda, dtype=dtype).requires_grad_()
        u = torch.ones_like(a).requires_grad_()
        y = swiglu(a, u); y.sum().backward()
        assert y.isfinite().all() and a.grad.isfinite().all() and u.grad.isfinite().all()
        assert y[-1] == a[-1] and not y[0] and a.grad[-1] == 1 and not a.grad[0]


def test_the_cpu_half_is_the_same_arithmetic(ns):
    a, u, d = torch.randn(3, 1000, 77)
    for x, y in zip((ns.swiglu(a.cuda(), u.cuda()), *ns.swiglu_backward(d.cuda(), a.cuda(), u.cuda())), (ns.swiglu(a, u), *ns.swiglu_backward(d, a, u))): assert rel_error(x.cpu(), y) < 2e-7


@pytest.mark.parametrize('dtype', DTYPES)
def test_opcheck(ns, dtype):
    a, u, d = torch.randn(3, 4, 37, **cuda).to(dtype)
    torch.library.opcheck(ns.swiglu, (a.requires_grad_(), u.requires_grad_()))
    torch.library.opcheck(ns.swiglu_backward, (d.detach(), a.detach(), u.detach()))


def problem(dtype, shape=(300, 257)): return torch.randn(shape, **cuda).to(dtype).requires_grad_(), torch.randn(shape, **cuda).to(dtype).requires_grad_(), torch.randn(shape, **cuda).to(dtype)
def run(f, a, u, d):
    y = f(a, u)
    return y, *torch.autograd.grad(y, (a, u), d)


@pytest.mark.parametrize('dtype', DTYPES)
def test_a_hundred_runs_and_poisoned_memory(ns, dtype):
    x = problem(dtype)
    torch.use_deterministic_algorithms(True)                                     # fills fresh memory with NaN
    try:
        first = run(swiglu, *x)
        assert all(t.isfinite().all() for t in first)
        for _ in range(100): assert all(map(torch.equal, first, run(swiglu, *x)))
    finally: torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize('dtype', DTYPES)
def test_compiled(ns, dtype):
    torch._dynamo.reset()
    f = torch.compile(swiglu, fullgraph=True)
    for shape in ((300, 257), (300, 257), (2, 64)):
        x = problem(dtype, shape)
        for a, b in zip(run(f, *x), run(swiglu, *x)): assert torch.equal(a, b)


def test_cuda_graph(ns):
    x = problem(BF16)
    side = torch.cuda.Stream(); side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3): run(swiglu, *x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph): out = run(swiglu, *x)
    with torch.no_grad():
        for t in x: t.copy_(torch.randn_like(t))
    graph.replay()
    assert all(map(torch.equal, out, run(swiglu, *x)))


def test_empty_stream_device(ns):
    for shape in ((0,), (0, 8), (3, 0)):
        a = torch.empty(shape, **cuda, requires_grad=True)
        y = swiglu(a, torch.empty(shape, **cuda)); y.sum().backward()
        assert y.shape == a.grad.shape == shape
    x = problem(F32)
    want, s = run(swiglu, *x), torch.cuda.Stream()
    s.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(s): got = run(swiglu, *x)
    s.synchronize()
    assert all(map(torch.equal, got, want))
    if torch.cuda.device_count() > 1:
        a = torch.randn(5, 7, device='cuda:1')
        assert rel_error(swiglu(a, a), swiglu_ref(a, a)) < 1e-6


def test_nothing_waits_for_the_gpu(ns):
    x = problem(BF16); run(swiglu, *x); torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode('error')
    try: run(swiglu, *x)
    finally: torch.cuda.set_sync_debug_mode('default')


def test_bad_arguments_are_named(ns):
    a = torch.ones(2, 3, **cuda)
    for bad, word in [(lambda: swiglu(a, torch.ones(3, **cuda)), 'up must have shape'), (lambda: swiglu(a, a.half()), 'up must be torch.float32'), (lambda: swiglu(a, a.cpu()), 'up must be on cuda'), (lambda: swiglu(a.int(), a), 'gate must be floating')]:
        with pytest.raises(ValueError, match=word): bad()


def test_second_derivative_refused_and_backward_twice(ns):
    a, u, d = problem(F32, (3, 5))
    y = swiglu(a, u)
    first = torch.autograd.grad(y, (a, u), d, retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(y, (a, u), d, retain_graph=True)))
    g, = torch.autograd.grad(y, a, d, create_graph=True)
    with pytest.raises(RuntimeError): torch.autograd.grad(g.sum(), a)
    with pytest.raises(RuntimeError):
        y = swiglu(a, u)
        with torch.no_grad(): a.mul_(2)
        torch.autograd.grad(y, a, d)


def test_beyond_31_bits(ns):
    N, D = 524290, 4096
    torch.cuda.empty_cache()
    a, u = torch.empty(N, D, **cuda, dtype=BF16).normal_(), torch.empty(N, D, **cuda, dtype=BF16).normal_()
    y = ns.swiglu(a, u)
    for part in (slice(N-3, None), slice(0, 3)): assert torch.equal(y[part], ns.swiglu(a[part].clone(), u[part].clone()))
    da, du = ns.swiglu_backward(y, a, u)
    for part in (slice(N-3, None), slice(0, 3)): assert all(map(torch.equal, (da[part], du[part]), ns.swiglu_backward(y[part].clone(), a[part].clone(), u[part].clone())))
    assert rel_error(y[-3:], swiglu_ref(a[-3:].double(), u[-3:].double())) < 3e-3
    del da, du
    b, v = a.view(-1)[1:], u.view(-1)[1:]                                         # and one element at a time
    y = ns.swiglu(b, v)
    assert torch.equal(y[-5:], ns.swiglu(b[-5:].clone(), v[-5:].clone()))
