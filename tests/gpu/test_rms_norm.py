"RMSNorm and residual-add + RMSNorm on a GPU: the kernels against float64 and torch, at the edges, beyond 2^31 elements, compiled, captured, and run a hundred times."
import math, random

import pytest, torch, torch.nn.functional as F

from xtrain.gradcheck import rel_error
from xtrain.kernels import kernels
from xtrain.ops.rms_norm import add_rms_norm, rms_norm, rms_norm_ref
from .helpers import BF16, DTYPES, F16, F32, F64, SEED, grads, leaf, no_larger, of_an_older_card, randn

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason='no GPU')
LAYOUTS = ['dense', 'padded', 'turned', 'offset', 'every other', 'expanded']


@pytest.fixture(autouse=True)
def seeded(): torch.manual_seed(0)


@pytest.fixture(scope='module')
def ns():
    ns = kernels('rms_norm') if torch.cuda.is_available() else None
    if ns is None: pytest.skip('the kernels cannot be had here')
    return ns


def rows(N, D, dtype, layout='dense', scale=1.):
    "Rows in memory that is not always what a kernel would like"
    if layout == 'padded': return randn(N, D+13, dtype=dtype, scale=scale)[:, :D]
    if layout == 'turned': return randn(D, N, dtype=dtype, scale=scale).t()
    if layout == 'offset': return randn(N*D+3, dtype=dtype, scale=scale)[3:].view(N, D)
    if layout == 'every other': return randn(N, 2*D, dtype=dtype, scale=scale)[:, ::2]
    if layout == 'expanded': return randn(1, D, dtype=dtype, scale=scale).expand(N, D)
    return randn(N, D, dtype=dtype, scale=scale)


def gains(D, dtype): return (1 + .2*torch.randn(D, device='cuda')).to(dtype)


WIDTHS = [1, 3, 8, 16, 24, 32, 64, 80, 96, 128, 136, 256, 264, 512, 768, 1000, 1001, 1024, 1032, 2048, 2056, 4096, 5120, 8192, 11008, 16384, 32768, 32776, 40000]
CASES = [(rng.choice([1, 2, 3, 7, 64, 301]), rng.choice(WIDTHS), rng.choice(DTYPES), rng.random() < .5, rng.choice(LAYOUTS), rng.choice(LAYOUTS), rng.choice([1e-6, 1e-5, 1e-2]), rng.choice([1e-3, 1., 1., 30.]), rng.randrange(10**6))
         for rng in [random.Random(SEED)] for _ in range(50)] + [(65, D, BF16, False, 'dense', 'dense', 1e-6, 1., D) for D in WIDTHS]

@pytest.mark.parametrize('N,D,dtype,master,lx,lg,eps,scale,seed', CASES)
def test_random(ns, N, D, dtype, master, lx, lg, eps, scale, seed):
    torch.manual_seed(seed)
    x, g = rows(N, D, dtype, lx, scale), rows(N, D, dtype, lg)
    w = gains(D, F32 if master else dtype)
    before = x.clone(), w.clone(), g.clone()
    y, (dx, dw) = rms_norm(x, w, eps), grads(lambda x, w: rms_norm(x, w, eps), (x, w), g)
    assert all(torch.equal(a, b) for a, b in zip((x, w, g), before))
    assert y.dtype == dx.dtype == dtype and dw.dtype == w.dtype and y.shape == dx.shape == x.shape
    wr = w.to(dtype)
    x64, w64, g64 = x.double(), wr.double(), g.double()
    want, (wdx, wdw) = rms_norm_ref(x64, w64, eps), grads(lambda x, w: rms_norm_ref(x, w, eps), (x64, w64), g64)
    ref = rms_norm_ref(x, w, eps)
    no_larger(y, ref, want)
    if dtype != F32: assert (y != ref).float().mean() < 2e-3 or y.numel() < 2000   # the roundings of the definition, but for the order of one sum
    tdx, tdw = grads(lambda x, w: F.rms_norm(x, (D,), w, eps), (x, wr), g)
    terms = g64*w64*x64.square().mean(-1, keepdim=True).add(eps).rsqrt()          # in a row of one channel they cancel
    no_larger(dx, tdx, wdx, terms); no_larger(dw, tdw, wdw)


@pytest.mark.parametrize('N,D,dtype,master,lx,lg,eps,scale,seed', CASES)
def test_random_with_the_addition(ns, N, D, dtype, master, lx, lg, eps, scale, seed):
    torch.manual_seed(seed)
    x, res, g, gh = rows(N, D, dtype, lx, scale), rows(N, D, dtype, lg, scale), rows(N, D, dtype, lg), rows(N, D, dtype, lx)
    w = gains(D, F32 if master else dtype)
    y, h = add_rms_norm(x, res, w, eps)
    assert torch.equal(h, x + res) and y.dtype == dtype
    if 'offset' not in (lx, lg): assert torch.equal(y, rms_norm(x + res, w, eps))   # an unaligned row takes another kernel, which adds in another order
    dx, dres, dw = grads(lambda x, r, w: add_rms_norm(x, r, w, eps), (x, res, w), g, gh)
    assert torch.equal(dx, dres) and dw.dtype == w.dtype
    w64, h64 = w.to(dtype).double(), h.double()
    want = grads(lambda h, w: (rms_norm_ref(h, w, eps), h*1), (h64, w64), g.double(), gh.double())
    theirs = grads(lambda h, w: (F.rms_norm(h, (D,), w, eps), h*1), (h, w.to(dtype)), g, gh)
    no_larger(dx, theirs[0], want[0], g.double()*w64*h64.square().mean(-1, keepdim=True).add(eps).rsqrt() + gh.double()); no_larger(dw, theirs[1], want[1])
    for keep in (0, 1):                                                          # only one of the two results is used
        ls = [leaf(t) for t in (x, res, w)]
        got = torch.autograd.grad(add_rms_norm(*ls, eps)[keep], ls, (g, gh)[keep], allow_unused=True)
        if keep: assert torch.equal(got[0], gh) and (got[2] is None or not got[2].any())
        else: assert torch.equal(got[0], grads(lambda h, w: rms_norm(h, w, eps), (h, w), g)[0])


@pytest.mark.parametrize('dtype', DTYPES)
def test_known_faults(dtype):
    "Overflow of squares, the place of epsilon, a row of zeros, the order of roundings, a float32 gain"
    one = torch.ones(1024, device='cuda', dtype=dtype)
    for D in (1024, 1023, 128, 8192): assert rms_norm(torch.full((2, D), 300., device='cuda', dtype=dtype), torch.ones(D, device='cuda', dtype=dtype)).eq(1).all()
    small = rms_norm(torch.full((2, 1024), 1e-3, device='cuda', dtype=dtype), one).float()
    assert (small/.7071068 - 1).abs().max() < (1e-5 if dtype == F32 else 5e-3)
    x, w, g = torch.zeros(3, 1024, device='cuda', dtype=dtype), gains(1024, dtype), randn(3, 1024, dtype=dtype)
    assert rms_norm(x, w).eq(0).all()
    dx, dw = grads(rms_norm, (x, w), g)
    assert dw.eq(0).all() and rel_error(dx, (g.double()*w.double()*1000)) < (1e-6 if dtype == F32 else 5e-3)
    y = rms_norm(x, w.float())
    assert y.dtype == dtype and grads(rms_norm, (x, w.float()), g)[1].dtype == F32


def test_order_of_roundings():
    x, w = (torch.arange(1, 9, device='cuda')/4).bfloat16(), (1.0078125 + torch.arange(8, device='cuda')/128).bfloat16()
    want = torch.tensor([.2001953125, .40234375, .609375, .81640625, 1.0234375, 1.2421875, 1.4609375, 1.6875], device='cuda')
    for gain in (w, w.float()):
        assert torch.equal(rms_norm(x, gain).float(), want)
        assert torch.equal(rms_norm(x.expand(64, 8), gain).float(), want.expand(64, 8))
        assert torch.equal(add_rms_norm(x, torch.zeros_like(x), gain)[0].float(), want)
    w = gains(128, F32)                                                          # a master whose digits bfloat16 does not have
    assert torch.equal(rms_norm(x64 := randn(64, 128, dtype=BF16), w), rms_norm(x64, w.bfloat16()))


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('w_dtype', [F64, BF16, F16])
def test_a_gain_of_another_dtype(ns, dtype, w_dtype):
    "Is rounded to that of the rows, and gets its gradient in its own; the kernel itself refuses what it cannot read"
    for D in (64, 1000, 4096):
        x, r, w, g = rows(30, D, dtype), rows(30, D, dtype), gains(D, w_dtype), rows(30, D, dtype)
        assert torch.equal(rms_norm(x, w), rms_norm(x, w.to(dtype))) and torch.equal(add_rms_norm(x, r, w)[0], add_rms_norm(x, r, w.to(dtype))[0])
        for a, b in zip(grads(rms_norm, (x, w), g), grads(rms_norm, (x, w.to(dtype)), g)): assert rel_error(a, b) < 2e-2
        assert grads(rms_norm, (x, w), g)[1].dtype == w_dtype
        if w_dtype == dtype: continue
        for call in (lambda: ns.rms_norm(x, w, 1e-6), lambda: ns.add_rms_norm(x, r, w, 1e-6), lambda: ns.rms_norm_backward(g, x, w, 1e-6), lambda: ns.add_rms_norm_backward(g, g, x, w, 1e-6)):
            with pytest.raises(RuntimeError, match='the gain must be float32 or of x'): call()


def test_threads_with_rows_of_different_width():
    "How much shared memory a kernel may ask for belongs to the kernel, not to a launch"
    import threading
    data = {D: (rows(600, D, BF16), gains(D, F32), rows(600, D, BF16)) for D in (1536, 3584, 4096)}
    want, wrong = {D: grads(rms_norm, (x, w), g) for D, (x, w, g) in data.items()}, []
    ns = kernels('rms_norm')
    def work(D):
        x, w, g = data[D]
        try:
            for _ in range(300):
                if not all(map(torch.equal, ns.rms_norm_backward(g, x, w, 1e-6), want[D])): wrong.append(D)
        except RuntimeError as e: wrong.append(f'{D}: {e}')
    threads = [threading.Thread(target=work, args=(D,)) for D in data]
    for t in threads: t.start()
    for t in threads: t.join()
    assert not wrong


OLDER = """
import torch
from xtrain.kernels import kernels
ns = kernels('rms_norm')
torch.manual_seed(0)
g, x, w = torch.randn(4096, 2048, device='cuda'), torch.randn(4096, 2048, device='cuda'), torch.ones(2048, device='cuda')
dw = (g.double()*x.double()*(x.double().square().mean(-1, keepdim=True)+1e-6).rsqrt()).sum(0)
first = ns.rms_norm_backward(g, x, w, 1e-6)
assert (first[1]-dw).norm() < 1e-5*dw.norm()
for _ in range(500):
    x.add_(0); assert all(map(torch.equal, ns.rms_norm_backward(g, x, w, 1e-6), first))
print('right')
"""


def test_code_of_an_older_card_is_launched_as_there(tmp_path):
    "PTX of an A100 does not wait for the kernel before it by itself, so no kernel of it may begin early"
    of_an_older_card(OLDER, tmp_path/'c')


@pytest.mark.parametrize('D,dtype', [(64, F16), (1000, F32), (4096, BF16)])
def test_opcheck(ns, D, dtype):
    for w in (gains(D, F32),):
        x, r = leaf(rows(5, D, dtype)), leaf(rows(5, D, dtype, 'padded'))
        torch.library.opcheck(ns.rms_norm.default, (x, leaf(w), 1e-6))
        torch.library.opcheck(ns.add_rms_norm.default, (x, r, leaf(w), 1e-6))
        torch.library.opcheck(ns.rms_norm_backward.default, (rows(5, D, dtype), x.detach(), w, 1e-6))
        torch.library.opcheck(ns.add_rms_norm_backward.default, (rows(5, D, dtype), rows(5, D, dtype), x.detach(), w, 1e-6))


@pytest.mark.parametrize('D,N,dtype', [(64, 5000, F16), (128, 20000, BF16), (1000, 777, BF16), (1024, 3000, BF16), (4096, 3000, BF16), (4096, 500, F32)])
def test_a_hundred_runs(D, N, dtype):
    x, r, w, g, gh = rows(N, D, dtype), rows(N, D, dtype), gains(D, F32), rows(N, D, dtype), rows(N, D, dtype)
    side, junk, first = torch.cuda.Stream(), torch.randn(1 << 22, device='cuda'), None
    for i in range(100):
        with torch.cuda.stream(side): junk.mul_(1.0001)                          # something else on the card
        got = rms_norm(x, w), *grads(rms_norm, (x, w), g), *add_rms_norm(x, r, w), *grads(add_rms_norm, (x, r, w), g, gh)
        first = first or got
        assert all(torch.equal(a, b) for a, b in zip(got, first)), i


@pytest.mark.parametrize('D', [8, 128, 512, 1000, 1024, 4096, 16384])
def test_a_row_does_not_know_its_neighbours(D):
    x, g, w = rows(999, D, BF16), rows(999, D, BF16), gains(D, F32)
    y, dx = rms_norm(x, w), grads(rms_norm, (x, w), g)[0]
    for a, b in [(0, 1), (5, 8), (998, 999), (500, 999)]:
        assert torch.equal(rms_norm(x[a:b], w), y[a:b]) and torch.equal(grads(rms_norm, (x[a:b], w), g[a:b])[0], dx[a:b])


@pytest.mark.parametrize('D,dtype', [(4096, BF16), (128, BF16), (1000, F16)])
def test_beyond_two_to_the_31(D, dtype):
    N = 2**31//D + 2
    x, w = torch.empty(N, D, device='cuda', dtype=dtype).normal_(), gains(D, F32)
    tail = slice(N-3, N)
    y = rms_norm(x, w)
    assert torch.equal(y[tail], rms_norm(x[tail], w)) and not y[tail].isnan().any()
    dx, dw = torch.autograd.grad(rms_norm(a := leaf(x), b := leaf(w)), (a, b), y)
    assert torch.equal(dx[tail], grads(rms_norm, (x[tail], w), y[tail])[0])
    del dx
    halves = [grads(rms_norm, (x[part], w), y[part])[1] for part in (slice(0, N//2), slice(N//2, N))] # Each below 2^31
    assert rel_error(dw, halves[0].double() + halves[1].double()) < 1e-4
    z, h = add_rms_norm(x, y, w)
    assert torch.equal(h[tail], x[tail] + y[tail]) and torch.equal(z[tail], rms_norm(h[tail], w))
    dh = torch.autograd.grad(add_rms_norm(a := leaf(x), y, w), a, (z, h))[0]
    assert torch.equal(dh[tail], grads(add_rms_norm, (x[tail], y[tail], w), z[tail], h[tail])[0])


def test_more_rows_than_a_grid_holds():
    "Refused in words, not launched in part"
    w = torch.ones(1, device='cuda', dtype=BF16)
    with pytest.raises(RuntimeError, match='a grid holds 2.31 - 1 rows, got 2147483648; call it on parts'): rms_norm(torch.empty(2**31, 1, device='cuda', dtype=BF16), w)


@pytest.mark.parametrize('shape', [(0, 8), (2, 0, 3, 8), (3, 0), (0,)])
def test_empty(shape):
    for dtype in DTYPES:
        x, w = randn(*shape, dtype=dtype), randn(shape[-1])
        y, (dx, dw) = rms_norm(x, w), grads(rms_norm, (x, w), torch.zeros_like(x))
        assert y.shape == dx.shape == x.shape and dw.eq(0).all() and dw.shape == w.shape
        got = grads(add_rms_norm, (x, x, w), torch.zeros_like(x), torch.zeros_like(x))
        assert got[0].shape == x.shape and got[2].eq(0).all()


def test_shapes_and_strides():
    w = gains(48, F32)
    for x in (randn(48), randn(2, 3, 5, 48), randn(5, 4, 3, 48).permute(2, 0, 1, 3), randn(48, 3, 2).permute(2, 1, 0)):
        assert rel_error(rms_norm(x, w), rms_norm_ref(x.double(), w.double())) < 1e-6
        dx = torch.autograd.grad(rms_norm(a := leaf(x), w).sum(), a)[0]          # a gradient of stride 0
        assert rel_error(dx, grads(lambda x: rms_norm_ref(x, w.double()), (x.double(),), torch.ones_like(x, dtype=F64))[0]) < 2e-6
    x, w = randn(3, 48), gains(96, F32)[::2]
    assert torch.equal(rms_norm(x, w), rms_norm(x, w.contiguous()))


@pytest.mark.parametrize('dtype', [BF16])
def test_compiled_is_eager(dtype):
    torch._dynamo.reset()
    x, r, w, g = rows(37, 256, dtype), rows(37, 256, dtype), gains(256, F32), rows(37, 256, dtype)
    def f(x, r, w):
        y, h = add_rms_norm(x, r, w)
        return rms_norm(y, w), h
    c = torch.compile(f, fullgraph=True)
    assert all(torch.equal(a, b) for a, b in zip((*c(x, r, w), *grads(c, (x, r, w), g, g)), (*f(x, r, w), *grads(f, (x, r, w), g, g))))
    more = [rows(53, 256, dtype) for _ in range(2)]                              # another number of rows: dynamic shapes
    assert all(torch.equal(a, b) for a, b in zip(c(*more, w), f(*more, w)))


def test_captured_and_replayed():
    x, w, g = leaf(rows(64, 1024, BF16)), leaf(gains(1024, F32)), rows(64, 1024, BF16)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3): torch.autograd.grad(rms_norm(x, w), (x, w), g)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = rms_norm(x, w)
        dx, dw = torch.autograd.grad(y, (x, w), g)
    with torch.no_grad(): x.copy_(rows(64, 1024, BF16)); g.copy_(rows(64, 1024, BF16))
    for t in (y.detach(), dx, dw): t.fill_(math.nan)
    graph.replay()
    assert torch.equal(y, rms_norm(x, w)) and all(torch.equal(a, b) for a, b in zip((dx, dw), grads(rms_norm, (x, w), g)))


def test_another_stream_and_no_wait():
    x, w = rows(4096, 4096, BF16), gains(4096, F32)
    want, side = rms_norm(x, w), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode('error')
    try:
        with torch.cuda.stream(side): got = [rms_norm(x, w) for _ in range(3)]
        grads(rms_norm, (x, w), x)
    finally: torch.cuda.set_sync_debug_mode(mode)
    side.synchronize()
    assert all(torch.equal(a, want) for a in got)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason='one GPU')
def test_another_device():
    x, w, g = rows(9, 1000, BF16), gains(1000, F32), rows(9, 1000, BF16)
    there = [t.to('cuda:1') for t in (x, w, g)]
    assert torch.equal(rms_norm(*there[:2]).cpu(), rms_norm(x, w).cpu())
    for a, b in zip(grads(rms_norm, there[:2], there[2]), grads(rms_norm, (x, w), g)): assert torch.equal(a.cpu(), b.cpu())


def test_no_second_derivative_and_no_stale_input():
    x, w = leaf(rows(4, 64, F32)), leaf(gains(64, F32))
    for out in (rms_norm(x, w), add_rms_norm(x, x, w)[0]):
        d = torch.autograd.grad(out.square().sum(), x, create_graph=True)[0]
        with pytest.raises(RuntimeError, match='once_differentiable'): d.sum().backward()
    work = x*1
    y = rms_norm(work, w)
    work.mul_(2)
    with pytest.raises(RuntimeError, match='inplace'): y.sum().backward()


@pytest.mark.parametrize('call, says', [
    (lambda o: rms_norm(o, torch.ones(3, device='cuda')), 'w must have shape (4,), got (3,)'), (lambda o: rms_norm(o, torch.ones(4)), 'w must be on cuda:0, got cpu'),
    (lambda o: rms_norm(o.long(), torch.ones(4, device='cuda')), 'x must be floating-point'), (lambda o: add_rms_norm(o, o[:1], torch.ones(4, device='cuda')), 'res must have shape (2, 4), got (1, 4)'),
    (lambda o: add_rms_norm(o, o.half(), torch.ones(4, device='cuda')), 'res must be torch.float32'), (lambda o: add_rms_norm(o, o.cpu(), torch.ones(4, device='cuda')), 'res must be on cuda:0')])
def test_errors_name_the_argument(call, says):
    with pytest.raises(ValueError) as e: call(torch.ones(2, 4, device='cuda'))
    assert says in str(e.value) and '\n' not in str(e.value)


def test_float64_takes_torchs_ops():
    x, w = torch.randn(3, 8, device='cuda', dtype=F64), torch.randn(8, device='cuda', dtype=F64)
    assert torch.autograd.gradcheck(rms_norm, (leaf(x), leaf(w))) and torch.autograd.gradcheck(add_rms_norm, (leaf(x), leaf(x.flip(0)), leaf(w)))
