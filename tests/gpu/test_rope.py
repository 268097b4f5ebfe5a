"RoPE and QK-norm + RoPE on a GPU: the kernels against float64 and torch, to the bit where there is nothing to add up, at the edges, beyond 2^31 elements, compiled, captured, and run a hundred times."
import math, random

import pytest, torch

from xtrain.config import ModelConfig
from xtrain.gradcheck import rel_error
from xtrain.kernels import kernels
from xtrain.model import TinyTransformer
from xtrain.ops.rope import qk_norm_rope, qk_norm_rope_ref, rope, rope_ref, rope_tables
from .helpers import BF16, DTYPES, F16, F32, F64, SEED, grads, leaf, no_larger, randn

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason='no GPU')


@pytest.fixture(autouse=True)
def seeded(): torch.manual_seed(0)


@pytest.fixture(scope='module')
def ns():
    ns = kernels('rope') if torch.cuda.is_available() else None
    if ns is None: pytest.skip('the kernels cannot be had here')
    return ns


def make(shape, dtype, layout):
    "Random numbers of this shape in memory that is not always what a kernel would like"
    if layout in ('BTHD', 'swapped'): return randn(shape[0], shape[2], shape[1], shape[3], dtype=dtype).transpose(1, 2)
    if layout == 'offset': return randn(math.prod(shape)+3, dtype=dtype)[3:].view(shape)
    if layout == 'part': return randn(shape[0], shape[1], shape[2]+2, 3*shape[3], dtype=dtype)[:, :, 1:-1, shape[3]:2*shape[3]]
    if layout == 'every other': return randn(*shape[:-1], 2*shape[-1], dtype=dtype)[..., ::2]
    if layout == 'turned': return randn(*reversed(shape), dtype=dtype).permute(3, 2, 1, 0)
    if layout == 'expanded': return randn(1, 1, 1, shape[3], dtype=dtype).expand(shape)
    return randn(*shape, dtype=dtype)


LAYOUTS = ['BHTD', 'BTHD', 'offset', 'part', 'every other', 'turned', 'expanded']
TABLES = ['shared', 'by row', 'by head', 'halves differ']


def tables(B, H, T, D, dtype, kind):
    lead = {'shared': (), 'by row': (B, 1), 'by head': (1, H), 'halves differ': ()}[kind]
    if kind == 'halves differ': return randn(T, D, dtype=dtype), randn(T, D, dtype=dtype)
    return rope_tables(torch.randint(9000, (*lead, T), device='cuda'), D, dtype=dtype)


CASES = [(rng.choice([1, 2, 3]), rng.choice([1, 2, 3, 4, 5, 8, 12, 32]), rng.choice([1, 2, 17, 63, 64, 129]), rng.choice([2, 6, 8, 16, 18, 32, 48, 64, 72, 80, 96, 128, 160, 192, 256, 512, 1024]), rng.choice(DTYPES),
          rng.choice(LAYOUTS), rng.choice(LAYOUTS), rng.choice(TABLES), rng.random() < .5, rng.randrange(10**6)) for rng in [random.Random(SEED)] for _ in range(100)]

@pytest.mark.parametrize('B,H,T,D,dtype,lx,lg,kind,master,seed', CASES)
def test_rope_has_the_bits_of_the_definition(ns, B, H, T, D, dtype, lx, lg, kind, master, seed):
    torch.manual_seed(seed)
    x, g, (cos, sin) = make((B, H, T, D), dtype, lx), make((B, H, T, D), dtype, lg), tables(B, H, T, D, dtype, kind)
    before = x.clone(), g.clone()
    y, (dx,) = rope(x, cos, sin), grads(lambda x: rope(x, cos, sin), (x,), g)
    assert torch.equal(y, rope_ref(x, cos, sin)) and y.dtype == dtype
    assert torch.equal(dx, grads(lambda x: rope_ref(x, cos, sin), (x,), g)[0])
    assert torch.equal(x, before[0]) and torch.equal(g, before[1])
    if B == H == 1 and kind in ('shared', 'halves differ'): assert torch.equal(rope(x[0, 0], cos, sin), y[0, 0]) and torch.equal(rope(x[0], cos, sin), y[0])


@pytest.mark.parametrize('B,H,T,D,dtype,lx,lg,kind,master,seed', CASES)
def test_qk_norm_rope(ns, B, H, T, D, dtype, lx, lg, kind, master, seed):
    torch.manual_seed(seed)
    x, g, (cos, sin) = make((B, T, H, D), dtype, lx), make((B, H, T, D), dtype, lg), tables(B, H, T, D, dtype, kind)
    w = (1 + .2*torch.randn(D, device='cuda')).to(F32 if master else dtype)
    before = x.clone(), g.clone()
    f = lambda x, w: qk_norm_rope(x, w, cos, sin)
    y, (dx, dw) = f(x, w), grads(f, (x, w), g)
    assert torch.equal(x, before[0]) and torch.equal(g, before[1])
    assert y.dtype == dx.dtype == dtype and dw.dtype == w.dtype and y.shape == (B, H, T, D) and dx.shape == x.shape
    c64, s64, w64 = cos.double(), sin.double(), w.to(dtype).double()
    f64 = lambda x, w: qk_norm_rope_ref(x, w, c64, s64)
    want, (wdx, wdw) = f64(x.double(), w64), grads(f64, (x.double(), w64), g.double())
    two = lambda x, w: qk_norm_rope_ref(x, w, cos, sin)                          # torch's own ops, one after the other
    ref, (tdx, tdw) = two(x, w), grads(two, (x, w), g)
    no_larger(y, ref, want)
    if dtype != F32: assert (y != ref).float().mean() < 4e-3 or y.numel() < 2000
    if D > 2: no_larger(dx, tdx, wdx)                                            # with two channels the terms of dx cancel
    no_larger(dw, tdw, wdw)


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('D', [6, 16, 64])
def test_rows_that_overlap(ns, D, dtype):
    "A sliding window: of such a tensor torch lays out its like with the tokens side by side"
    t = rope_tables(torch.arange(9, device='cuda'), D, dtype=dtype)
    x = randn(2, 3, D+8, dtype=dtype).unfold(-1, D, 1)
    assert x.shape == (2, 3, 9, D) and x.stride()[-2:] == (1, 1)
    y = rope(x, *t)
    assert torch.equal(y, rope_ref(x, *t)) and y.stride(-1) == 1
    g = randn(2, 3, D+8, dtype=dtype).unfold(-1, D, 1)
    assert torch.equal(grads(lambda x: rope(x, *t), (x.contiguous(),), g)[0], grads(lambda x: rope_ref(x, *t), (x.contiguous(),), g.contiguous())[0])
    w = 1 + randn(D)/8
    assert torch.equal(qk_norm_rope(x.transpose(1, 2), w, *t), qk_norm_rope(x.transpose(1, 2).contiguous(), w, *t))
    if D > 8: assert torch.equal(qk_norm_rope(x.transpose(1, 2), w.double(), *t), qk_norm_rope(x.transpose(1, 2), w, *t))


def test_kernel_is_one_pass(ns):
    "The fused op does run where it should: one kernel of ours, and none of torch's"
    x, w, t = randn(2, 64, 8, 128, dtype=BF16), torch.ones(128, device='cuda'), rope_tables(torch.arange(64, device='cuda'), 128, dtype=BF16)
    qk_norm_rope(x, w, *t)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as p: qk_norm_rope(x, w, *t); torch.cuda.synchronize()
    names = [e.name for e in p.events() if 'kernel' in e.name.lower() and not e.name.startswith('cu')]
    assert len(names) <= 1 and all('turn_kernel' in n for n in names), names


def test_tables_far_out():
    "Positions that bfloat16 does not have; against float64"
    pos = torch.tensor([255, 257, 4095, 15962, 32767], device='cuda')
    cos, sin = rope_tables(pos, 128, 1e6)
    assert torch.allclose(cos[1:, 0].cpu(), torch.tensor([.8193055, -.0659760, -.9080159, .9822634]), atol=1e-6)
    exact = rope_tables(pos, 128, 1e6, F64)[0]
    assert (cos[2].double()-exact[2]).abs().max() <= 2e-4
    e = torch.eye(128, device='cuda')[:1].expand(1, 1, 5, 128)
    for dtype, tol in ((F32, 1e-6), (BF16, 4e-3)):
        y = rope(e.to(dtype), *rope_tables(pos, 128, 1e6, dtype))
        assert torch.allclose(y[0, 0, 1:, 0].cpu().float(), torch.tensor([.8193055, -.0659760, -.9080159, .9822634]), atol=tol)


def test_a_model_in_bfloat16_keeps_its_angles():
    cfg = ModelConfig(vocab_size=50, dim=32, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=128, ffn_dim=32, max_seq_len=40_000, rope_theta=1e6)
    m = TinyTransformer(cfg, seed=0, std=None).cuda().to(BF16); m.dtype = BF16
    m.rope_tables(0, 5, 'cuda')
    cos, _ = m.rope_tables(0, 32_768, 'cuda')                                    # longer than what was kept, while in bfloat16
    for p, c in ((257, .8193055), (4095, -.0659760), (15962, -.9080159), (32767, .9822634)): assert abs(cos[p, 0].item()-c) < 4e-3


@pytest.mark.parametrize('D,dtype', [(64, F16), (128, BF16)])
def test_opcheck(ns, D, dtype):
    for layout in ('BHTD', 'BTHD'):
        x, (cos, sin), g = make((2, 3, 5, D), dtype, layout), tables(2, 3, 5, D, dtype, 'shared'), make((2, 3, 5, D), dtype, layout)
        torch.library.opcheck(ns.rope.default, (leaf(x), cos, sin))
        torch.library.opcheck(ns.rope_backward.default, (leaf(g), cos, sin))
        for w in (randn(D),):
            q = leaf(make((2, 5, 3, D), dtype, layout))
            torch.library.opcheck(ns.qk_norm_rope.default, (q, leaf(w), cos, sin, 1e-6))
            torch.library.opcheck(ns.qk_norm_rope_backward.default, (g, q.detach(), w, cos, sin, 1e-6))


@pytest.mark.parametrize('H,D,dtype', [(32, 128, BF16), (8, 64, F32), (2, 32, F16), (5, 256, BF16), (3, 96, BF16)])
def test_a_hundred_runs(H, D, dtype):
    x, g, w, t = randn(2, 512, H, D, dtype=dtype), randn(2, H, 512, D, dtype=dtype), randn(D), rope_tables(torch.arange(512, device='cuda'), D, dtype=dtype)
    f, side, junk, first = lambda x, w: qk_norm_rope(x, w, *t), torch.cuda.Stream(), torch.randn(1 << 22, device='cuda'), None
    for i in range(100):
        with torch.cuda.stream(side): junk.mul_(1.0001)
        got = f(x, w), *grads(f, (x, w), g), rope(g, *t)
        first = first or got
        assert all(torch.equal(a, b) for a, b in zip(got, first)), i


def test_a_token_does_not_know_its_neighbours():
    x, g, w, (cos, sin) = randn(3, 65, 6, 128, dtype=BF16), randn(3, 6, 65, 128, dtype=BF16), randn(128), rope_tables(torch.arange(65, device='cuda'), 128, dtype=BF16)
    y, dx = qk_norm_rope(x, w, cos, sin), grads(lambda x: qk_norm_rope(x, w, cos, sin), (x,), g)[0]
    for b, t in ((0, 0), (2, 64), (1, 33)):
        one = lambda x: qk_norm_rope(x, w, cos[t:t+1], sin[t:t+1])
        assert torch.equal(one(x[b:b+1, t:t+1]), y[b:b+1, :, t:t+1]) and torch.equal(grads(one, (x[b:b+1, t:t+1],), g[b:b+1, :, t:t+1])[0], dx[b:b+1, t:t+1])


@pytest.mark.parametrize('layout', ['BTHD', 'BHTD'])
def test_beyond_two_to_the_31(layout):
    H, D = 32, 128
    T = 2**31//(H*D) + 2
    shape = (1, T, H, D) if layout == 'BTHD' else (1, H, T, D)
    x = torch.empty(shape, device='cuda', dtype=BF16).normal_()
    x = x.transpose(1, 2) if layout == 'BTHD' else x                             # (1, H, T, D)
    cos, sin = rope_tables(torch.arange(T, device='cuda'), D, 1e6, BF16)
    end = (slice(None), slice(None), slice(T-3, T))
    y = rope(x, cos, sin)
    assert torch.equal(y[end], rope(x[end], cos[T-3:], sin[T-3:])) and not y[end].isnan().any()
    w = torch.ones(D, device='cuda')
    q, part = x.transpose(1, 2), x[end].transpose(1, 2)
    f, f3 = lambda q, w: qk_norm_rope(q, w, cos, sin), lambda q, w: qk_norm_rope(q, w, cos[T-3:], sin[T-3:])
    assert torch.equal(f(q, w)[end], f3(part, w))
    dx, dw = grads(f, (q, w), y)
    assert torch.equal(dx[:, T-3:], grads(f3, (part, w), y[end])[0])
    halves = [grads(lambda q, w: qk_norm_rope(q, w, cos[a:b], sin[a:b]), (q[:, a:b], w), y[:, :, a:b])[1] for a, b in ((0, T//2), (T//2, T))] # Each below 2^31
    assert rel_error(dw, halves[0].double() + halves[1].double()) < 1e-4


@pytest.mark.parametrize('B,T,H,D', [(0, 5, 2, 8), (1, 0, 2, 8), (1, 5, 0, 8), (1, 5, 2, 0)])
def test_empty(B, T, H, D):
    for dtype in DTYPES:
        x, w, t = randn(B, T, H, D, dtype=dtype), randn(D), (randn(T, D, dtype=dtype), randn(T, D, dtype=dtype))
        assert rope(x.transpose(1, 2), *t).shape == (B, H, T, D)
        dx, dw = grads(lambda x, w: qk_norm_rope(x, w, *t), (x, w), torch.zeros(B, H, T, D, device='cuda', dtype=dtype))
        assert dx.shape == x.shape and dw.shape == w.shape and dw.eq(0).all()


@pytest.mark.parametrize('dtype', [BF16])
def test_compiled_is_eager(dtype):
    torch._dynamo.reset()
    def f(x, w, cos, sin):
        q = qk_norm_rope(x, w, cos, sin)
        return rope(q, cos, sin)
    c = torch.compile(f, fullgraph=True)
    for T in (17, 40):
        x, w, t, g = randn(2, T, 3, 64, dtype=dtype), randn(64), rope_tables(torch.arange(T, device='cuda'), 64, dtype=dtype), randn(2, 3, T, 64, dtype=dtype)
        assert torch.equal(c(x, w, *t), f(x, w, *t))
        assert all(torch.equal(a, b) for a, b in zip(grads(lambda x, w: c(x, w, *t), (x, w), g), grads(lambda x, w: f(x, w, *t), (x, w), g)))


def test_captured_and_replayed():
    x, w, g, t = leaf(randn(2, 64, 4, 128, dtype=BF16)), leaf(randn(128)), randn(2, 4, 64, 128, dtype=BF16), rope_tables(torch.arange(64, device='cuda'), 128, dtype=BF16)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3): torch.autograd.grad(qk_norm_rope(x, w, *t), (x, w), g)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = qk_norm_rope(x, w, *t)
        dx, dw = torch.autograd.grad(y, (x, w), g)
    with torch.no_grad(): x.copy_(randn(2, 64, 4, 128)); g.copy_(randn(2, 4, 64, 128))
    for v in (y.detach(), dx, dw): v.fill_(math.nan)
    graph.replay()
    assert torch.equal(y, qk_norm_rope(x, w, *t)) and all(torch.equal(a, b) for a, b in zip((dx, dw), grads(lambda x, w: qk_norm_rope(x, w, *t), (x, w), g)))


def test_second_derivatives():
    x, w, t = leaf(randn(1, 3, 2, 8)), leaf(randn(8)), rope_tables(torch.arange(3, device='cuda'), 8)
    v = torch.randn(1, 2, 3, 8, device='cuda')
    d = torch.autograd.grad((rope(x.transpose(1, 2), *t)**2*v).sum(), x, create_graph=True)[0]   # a rotation's gradient is a rotation: it has one
    want = torch.autograd.grad(torch.autograd.grad((rope_ref(x.transpose(1, 2), *t)**2*v).sum(), x, create_graph=True)[0].square().sum(), x)[0]
    assert rel_error(torch.autograd.grad(d.square().sum(), x)[0], want) < 1e-5
    d = torch.autograd.grad(qk_norm_rope(x, w, *t).square().sum(), x, create_graph=True)[0]
    with pytest.raises(RuntimeError, match='once_differentiable'): d.sum().backward()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason='one GPU')
def test_another_device():
    x, w, t = randn(2, 9, 3, 64, dtype=BF16), randn(64), rope_tables(torch.arange(9, device='cuda'), 64, dtype=BF16)
    assert torch.equal(qk_norm_rope(*(v.to('cuda:1') for v in (x, w, *t))).cpu(), qk_norm_rope(x, w, *t).cpu())


def test_no_wait_for_the_gpu_and_another_stream():
    x, w, t = randn(4, 512, 32, 128, dtype=BF16), randn(128), rope_tables(torch.arange(512, device='cuda'), 128, dtype=BF16)
    want, side, mode = qk_norm_rope(x, w, *t), torch.cuda.Stream(), torch.cuda.get_sync_debug_mode()
    side.wait_stream(torch.cuda.current_stream())
    torch.cuda.set_sync_debug_mode('error')
    try:
        with torch.cuda.stream(side): got = [qk_norm_rope(x, w, *t) for _ in range(3)]
    finally: torch.cuda.set_sync_debug_mode(mode)
    side.synchronize()
    assert all(torch.equal(a, want) for a in got)


@pytest.mark.parametrize('call, says', [
    (lambda x, w, c, s: rope(x.transpose(1, 2)[..., :7], c, s), 'x must have an even number'), (lambda x, w, c, s: rope(x.transpose(1, 2), c[:4], s), 'cos must have shape'),
    (lambda x, w, c, s: rope(x.transpose(1, 2), c, s.half()), 'sin must be torch.float32'), (lambda x, w, c, s: rope(x.transpose(1, 2), c.cpu(), s), 'cos must be on cuda:0'),
    (lambda x, w, c, s: qk_norm_rope(x, w[:4], c, s), 'w must have shape (8,)'), (lambda x, w, c, s: qk_norm_rope(x, w.cpu(), c, s), 'w must be on cuda:0'),
    (lambda x, w, c, s: qk_norm_rope(x.transpose(1, 2), w, c, s), 'cos must have shape'), (lambda x, w, c, s: qk_norm_rope(x, w, c.expand(3, 1, 5, 8), s), 'cos of shape')])
def test_errors_name_the_argument(call, says):
    with pytest.raises(ValueError) as e: call(randn(1, 5, 2, 8), randn(8), *rope_tables(torch.arange(5, device='cuda'), 8))
    assert says in str(e.value) and '\n' not in str(e.value)


def test_the_model_on_a_gpu_is_the_model_on_a_cpu():
    "float32, both attention paths: logits, loss and every gradient"
    cfg = ModelConfig(vocab_size=101, dim=64, n_layers=2, n_heads=6, n_kv_heads=2, head_dim=32, ffn_dim=96, max_seq_len=64)
    ids, targets = torch.randint(101, (3, 33)), torch.randint(101, (3, 33))
    for path in ('composed', 'sdpa'):
        m = TinyTransformer(cfg, seed=0, std=.1, attention=path); n = TinyTransformer(cfg, seed=0, std=.1, attention=path).cuda()
        assert rel_error(n(ids.cuda()).cpu(), m(ids)) < 1e-5
        for mm, dev in ((m, 'cpu'), (n, 'cuda')): mm.loss(ids.to(dev), targets.to(dev)).backward()
        for (name, p), q in zip(m.params().items(), n.params().values()): assert rel_error(q.grad.cpu(), p.grad) < 1e-4, name
