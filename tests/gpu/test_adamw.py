"AdamW's kernel on a real card: torch's bits, norms, clipping, faults (A14, A17, B12), copies, CUDA graphs, no waiting."
import math, random
import pytest, torch
from xtrain.kernels import kernels
from xtrain import optim
from xtrain.optim import AdamW, grad_norm
from .helpers import SEED

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason='no GPU')
DEV = 'cuda'

@pytest.fixture(autouse=True)
def built():
    if torch.cuda.is_available(): assert kernels('adamw') is not None

def params(shapes, seed=0, dtype=torch.float32):
    rnd = torch.Generator(DEV).manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(s, generator=rnd, device=DEV).to(dtype)) for s in shapes]

def clones(P): return [torch.nn.Parameter(p.detach().clone(memory_format=torch.preserve_format)) for p in P]
def single(P, **kw): return torch.optim.AdamW(P, foreach=False, fused=False, **kw)
def state(opt): return [v for g in opt.param_groups for p in g['params'] for v in (p, *opt.state[p].values())]
def race(a, b, A, B, steps, scale=lambda t: 1., seed=1):
    "The same gradients to both; equal weights and moments after every step"
    rnd = torch.Generator(DEV).manual_seed(seed)
    for t in range(steps):
        for p, q in zip(A, B):
            p.grad = torch.randn(p.shape, generator=rnd, device=DEV)*scale(t)
            q.grad = p.grad.clone()
        a.step(); b.step()
        for p, q in zip(A, B):
            for x, y in ((p, q), *((a.state[p][k], b.state[q][k]) for k in ('exp_avg', 'exp_avg_sq'))): assert torch.equal(x, y), f'step {t+1}: {int((x != y).sum())} of {x.numel()} differ'

# ---- bits -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('kw', [dict(), dict(weight_decay=0.), dict(betas=(.9, .95), weight_decay=.1, lr=3e-4), dict(betas=(.4, .9), lr=.1), dict(betas=(0., 0.)), dict(eps=1e-3, betas=(.95, .99))], ids=str)
def test_bits_of_torch_single_tensor(kw):
    A = params([(1,), (3,), (1000,), (8192,), (100_001,), (7, 9, 11)]); B = clones(A)
    race(AdamW(A, **kw), single(B, **kw), A, B, 200, lambda t: 10.**(t % 7 - 3))

def test_bits_at_random_settings():
    r = random.Random(SEED)
    for seed in range(40):
        shapes = [tuple(r.choice((1, 2, 5, 8, 33, 64, 257, 1024)) for _ in range(r.randint(0, 3))) for _ in range(r.randint(1, 60))]
        kw = dict(lr=10**r.uniform(-5, 0), betas=(r.choice((0., .3, .5, .9, .99)), r.choice((.5, .9, .95, .999))), eps=10**r.uniform(-12, -2), weight_decay=r.choice((0., .01, .5)))
        A = params(shapes, seed); B = clones(A)
        race(AdamW(A, **kw), single(B, **kw), A, B, 6, lambda t: 10.**r.uniform(-4, 4), seed)

def test_many_steps_and_late_steps():
    A = params([(257,)]); B = clones(A); a, b = AdamW(A, betas=(.9, .999)), single(B, betas=(.9, .999))
    race(a, b, A, B, 2000)
    for s in (10**5, 10**6, 2**24 - 10):
        for o, P in ((a, A), (b, B)): o.state[P[0]]['step'].fill_(s)
        race(a, b, A, B, 5)

def test_groups_have_their_own_settings():
    A = params([(100,), (50, 3), (70,)]); B = clones(A)
    groups = lambda P: [dict(params=P[:1], lr=1e-2, weight_decay=.3), dict(params=P[1:2], betas=(.5, .6)), dict(params=P[2:], eps=1e-2)]
    race(AdamW(groups(A)), single(groups(B)), A, B, 30)

def test_a_group_for_each_of_100_tensors():
    A = params([(k + 1,) for k in range(100)]); B = clones(A); groups = lambda P: [dict(params=[p], lr=1e-3*(k + 1), weight_decay=k/100, betas=(.9 - k/200, .99)) for k, p in enumerate(P)]
    race(AdamW(groups(A)), single(groups(B)), A, B, 5)

def test_where_there_is_no_kernel(monkeypatch):
    "torch's own routine on the GPU: its bits, no waiting, and a NaN holds"
    monkeypatch.setattr(optim, 'cuda_ops', lambda name, x: None)
    A = params([(1000,), (30, 7)]); B = clones(A); a, b = AdamW(A, max_norm=2., hold=True), torch.optim.AdamW(B, fused=True)
    for t in range(6):
        for p, q in zip(A, B): p.grad = torch.randn_like(p); q.grad = p.grad.clone()
        optim.clip_grads([q.grad for q in B], 2.); b.step()
        if t == 3: torch.cuda.synchronize(); torch.cuda.set_sync_debug_mode('error')
        try: a.step()
        finally: torch.cuda.set_sync_debug_mode('default')
        assert all(map(torch.equal, A, B))
    was = [x.detach().clone() for x in state(a)]
    for bad in (math.nan, 0.):
        for p in A: p.grad = torch.full_like(p, 1 + bad)
        a.step(); assert all(map(torch.equal, was, state(a)))
    assert a.stop.item() == 1

def test_1200_tensors():
    A = params([(k % 50 + 1,) for k in range(1200)]); B = clones(A)
    race(AdamW(A), single(B), A, B, 3)

def test_parameters_without_gradients_wait():
    A = params([(10,), (20,)]); B = clones(A); a, b = AdamW(A), single(B)
    for t in range(6):
        for p, q in zip(A, B): p.grad = torch.ones_like(p); q.grad = torch.ones_like(q)
        if t % 2: A[1].grad = B[1].grad = None
        a.step(); b.step()
    assert all(map(torch.equal, A, B)) and [a.state[p]['step'].item() for p in A] == [6, 3]

@pytest.mark.parametrize('make', [lambda: torch.randn(40, 30, device=DEV).t(), lambda: torch.randn(40, 30, device=DEV)[:, :7], lambda: torch.randn(1001, device=DEV)[1:], lambda: torch.randn(0, 3, device=DEV), lambda: torch.randn((), device=DEV),
                                  lambda: torch.randn(4, 1, 5, device=DEV).transpose(0, 2), lambda: torch.randn(8, 6, device=DEV)[::2, ::3]], ids=['transposed', 'gaps', 'offset', 'empty', 'scalar', 'size 1', 'strided'])
@pytest.mark.parametrize('order', ['own', 'other', 'expanded'])
def test_any_stride(make, order):
    torch.manual_seed(0); p = make(); whole = p._base if p._base is not None else p
    A, B = [torch.nn.Parameter(p)], [torch.nn.Parameter(p.detach().clone())]
    used = torch.zeros_like(whole, dtype=torch.bool).as_strided(p.shape, p.stride(), p.storage_offset()).fill_(True)._base
    outside = whole.clone()
    a, b = AdamW(A), single(B)
    for _ in range(4):
        g = torch.randn(p.shape, device=DEV)
        A[0].grad = torch.empty_like(A[0]).copy_(g) if order == 'own' else g.clone() if order == 'other' else (g := torch.ones((), device=DEV).expand(p.shape))
        B[0].grad = g.clone(); a.step(); b.step()
        assert torch.equal(A[0], B[0])
    if used is not None: assert torch.equal(whole[~used], outside[~used])

# ---- norm and clipping -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16])
def test_norm_against_float64(dtype):
    r = random.Random(SEED+1)
    for seed in range(30):
        g = [torch.randn(r.choice((1, 7, 8191, 8193, 100_003, 1_000_000)), device=DEV).to(dtype) for _ in range(r.randint(1, 70))]
        want = math.sqrt(sum(x.double().square().sum().item() for x in g))
        assert abs(grad_norm(g).item()/want - 1) < 1e-13

def test_norm_is_the_same_every_time_and_anywhere():
    x = torch.randn(3_000_001, device=DEV)
    assert len({grad_norm([x]).item() for _ in range(100)}) == 1
    assert grad_norm([x[1:]]).item() == grad_norm([x[1:].clone()]).item()

@pytest.mark.parametrize('size,want', [(1e20, 1e21), (3e38, 3e39), (1e-30, 1e-29)])
def test_norm_of_huge_and_tiny(size, want):
    "B12: the square of 1e20 is infinite in float32"
    p = params([(100,)])[0]; p.grad = torch.full((100,), size, device=DEV)
    was, opt = p.detach().clone(), AdamW([p], lr=1e-2, max_norm=1., weight_decay=0.); opt.step()
    assert opt.norm.item() == pytest.approx(want, rel=1e-6)
    m = opt.state[p]['exp_avg']
    assert torch.allclose(m, torch.full_like(m, .1*min(size, .1)), rtol=1e-5) and (size < 1 or (p != was).any())   # the square of 1e-30 is 0, and so is the step, as in torch

def test_clipping_is_that_of_two_passes():
    A = params([(1000,), (77, 3)]); B = clones(A); a, b = AdamW(A, max_norm=.5), single(B)
    for t in range(30):
        for p, q in zip(A, B): p.grad = torch.randn_like(p)*(1e-3 if t % 3 else 1.); q.grad = p.grad.clone()
        norm = grad_norm([q.grad for q in B]); torch._foreach_mul_([q.grad for q in B], (.5/norm).clamp(max=1.).float())
        a.step(); b.step()
        assert all(map(torch.equal, A, B)) and a.norm.item() == norm.item()

@pytest.mark.parametrize('bad', [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize('hold', [False, True])
def test_not_finite_changes_nothing(bad, hold):
    "B12"
    P = params([(5000,), (300,), (12, 12)]); opt = AdamW(P, max_norm=1., hold=hold); c = torch.zeros(5000, device=DEV, dtype=torch.bfloat16); opt.add_copy(P[0], c)
    for p in P: p.grad = torch.randn_like(p)
    opt.step(); was = [x.detach().clone() for x in (*state(opt), c)]
    P[1].grad[77] = bad; opt.step()
    assert not opt.norm.isfinite() and [i for i, (a, b) in enumerate(zip(was, (*state(opt), c))) if not torch.equal(a, b)] == []
    P[1].grad[77] = 1.; opt.step()
    assert opt.norm.isfinite() and torch.equal(was[0], P[0]) == hold and opt.state[P[0]]['step'].item() == (1 if hold else 2)
    if hold:
        assert opt.stop.item() == 1
        opt.stop.zero_(); opt.step(); assert opt.state[P[0]]['step'].item() == 2 and not torch.equal(was[0], P[0])

def test_without_a_norm_nan_goes_through_as_in_torch():
    A = params([(10,)]); B = clones(A); a, b = AdamW(A), single(B)
    for p in (*A, *B): p.grad = torch.ones_like(p); p.grad[3] = math.nan
    a.step(); b.step()
    assert torch.equal(A[0].isnan(), B[0].isnan()) and A[0].isnan().sum() == 1

# ---- masters and copies ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('dtype,want', [(torch.float32, .9400020), (torch.bfloat16, .94140625), (torch.float16, .93994140625)])
def test_small_updates_are_not_lost(dtype, want):
    "A17"
    p = torch.nn.Parameter(torch.ones(1, device=DEV, dtype=dtype)); opt = AdamW([p], lr=6e-4, betas=(.9, .95), weight_decay=0.)
    for _ in range(100): p.grad = torch.ones_like(p); opt.step()
    assert p.item() == pytest.approx(want, abs=1e-7) and opt.state[p].get('master', p).item() == pytest.approx(.9400020, abs=1e-6)

@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_masters_follow_torch_in_float32(dtype):
    P = params([(1000,), (33, 5)], dtype=dtype); M = [torch.nn.Parameter(p.detach().float()) for p in P]; a, b = AdamW(P), single(M)
    for _ in range(20):
        for p, m in zip(P, M): p.grad = torch.randn_like(p); m.grad = p.grad.float()
        a.step(); b.step()
    assert all(torch.equal(a.state[p]['master'], m) and torch.equal(p, m.to(dtype)) for p, m in zip(P, M))

@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16])
def test_copies(dtype):
    P = params([(1000,), (40, 30)]); Q = clones(P); a, b = AdamW(P), single(Q); c = [torch.empty_like(p, dtype=dtype) for p in P[:1]]
    a.add_copy(P[0], c[0])
    for _ in range(5):
        for p, q in zip(P, Q): p.grad = torch.randn_like(p); q.grad = p.grad.clone()
        a.step(); b.step()
    assert all(map(torch.equal, P, Q)) and torch.equal(c[0], P[0].to(dtype))

# ---- dispatcher, graphs, streams ---------------------------------------------------------------------------------------

def test_opcheck():
    ns = kernels('adamw'); P = [torch.randn(33, device=DEV), torch.randn(6, 4, device=DEV).t()]; z = lambda: [torch.zeros_like(p) for p in P]
    hyper, steps = torch.tensor([[1e-3, .9, .999, 1e-8, .01]], dtype=torch.float64), [torch.zeros((), device=DEV) for _ in P]
    torch.library.opcheck(ns.grad_norm.default, (P,))
    torch.library.opcheck(ns.adamw_.default, (P, z(), z(), z(), [], steps, [2], hyper, None, None, 1., None, 1))
    torch.library.opcheck(ns.adamw_.default, (P, z(), z(), z(), [p.bfloat16() for p in P], steps, [2], hyper, torch.full((1,), .1, device=DEV), torch.ones((), device=DEV, dtype=torch.float64), 1., torch.zeros((), device=DEV), 0))

def test_norm_under_compile():
    g = [torch.randn(1000, device=DEV), torch.randn(30, 5, device=DEV)]
    assert torch.equal(torch.compile(lambda *x: grad_norm(list(x)), fullgraph=True)(*g), grad_norm(g))

@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
@pytest.mark.parametrize('two', [False, True])
def test_cuda_graph(dtype, two):
    "A captured step counts, clips and follows a rate that changes on the device"
    def run(graph, steps=25):
        P = params([(1000,), (64, 9)]); lr = [torch.zeros((), device=DEV, dtype=dtype) for _ in range(2)]
        for p in P: p.grad = torch.empty_like(p)
        opt = AdamW([dict(params=[p], lr=lr[k*two]) for k, p in enumerate(P)], max_norm=5., hold=True); opt.init_state(); go = opt.step
        if graph:
            g = torch.cuda.CUDAGraph(); torch.cuda.synchronize()
            with torch.cuda.graph(g): opt.step()
            go = g.replay
        rnd, norms = torch.Generator(DEV).manual_seed(3), []
        for k in range(steps):
            for i, l in enumerate(lr): l.fill_(1e-2*(steps-k)/steps*(i + 1))
            for p in P: p.grad.copy_(torch.randn(p.shape, generator=rnd, device=DEV)*(.01 if k % 2 else 1.))
            if k == 20: P[0].grad[0] = math.nan
            go(); norms.append(opt.norm.item())
        return norms, [x.detach().clone() for x in state(opt)]
    (na, a), (nb, b) = run(True), run(False)
    assert str(na) == str(nb) and all(map(torch.equal, a, b)) and a[1].item() == 20

def test_graph_before_a_state_is_refused():
    p = params([(10,)])[0]; p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match=r'init_state\(\)'):
        with torch.cuda.graph(torch.cuda.CUDAGraph()): AdamW([p]).step()

def test_rate_as_a_tensor_and_as_a_number():
    A = params([(1000,)]); B = clones(A)
    a, b = AdamW(A, lr=torch.tensor(.25, device=DEV)), AdamW(B, lr=.25)
    for p in (*A, *B): p.grad = torch.linspace(-1, 1, 1000, device=DEV)
    for _ in range(5): a.step(); b.step()
    assert torch.equal(A[0], B[0])

def test_nothing_waits():
    P = params([(100,), (30, 7)]); opt = AdamW(P, lr=1e-3, max_norm=1., hold=True)
    for p in P: p.grad = torch.randn_like(p)
    opt.step(); torch.cuda.synchronize(); torch.cuda.set_sync_debug_mode('error')
    try:
        for _ in range(5): opt.step()
    finally: torch.cuda.set_sync_debug_mode('default')

def test_another_stream():
    A = params([(1_000_000,)]); B = clones(A); a, b = AdamW(A, max_norm=1.), AdamW(B, max_norm=1.); s = torch.cuda.Stream()
    for p in (*A, *B): p.grad = torch.linspace(-1, 1, 1_000_000, device=DEV)
    torch.cuda.synchronize()
    with torch.cuda.stream(s): [a.step() for _ in range(20)]
    [b.step() for _ in range(20)]; torch.cuda.synchronize()
    assert torch.equal(A[0], B[0])

@pytest.mark.skipif(torch.cuda.device_count() < 2, reason='one GPU')
def test_another_device():
    p = torch.nn.Parameter(torch.ones(10, device='cuda:1')); p.grad = torch.ones_like(p); AdamW([p], lr=.1, max_norm=1.).step()
    assert torch.allclose(p, torch.full_like(p, .9), atol=1e-2)

def test_state_dict_round_trip():
    "Into ours and from torch's own; bfloat16 keeps its master"
    for dtype in (torch.float32, torch.bfloat16):
        A = params([(100,), (20, 3)], dtype=dtype); B = clones(A); a = AdamW(A)
        def grads(P, seed): [setattr(p, 'grad', torch.randn(p.shape, generator=torch.Generator(DEV).manual_seed(seed), device=DEV).to(dtype)) for p in P]
        for t in range(5): grads(A, t); a.step()
        for p, q in zip(A, B): q.data.copy_(p)
        b = AdamW(B); b.load_state_dict(a.state_dict())
        for t in range(5, 10): grads(A, t); grads(B, t); a.step(); b.step()
        assert all(map(torch.equal, state(a), state(b)))
    A = params([(100,)]); B = clones(A); a, b = single(A), AdamW(B)
    for t in range(3): A[0].grad = torch.ones_like(A[0]); a.step()
    B[0].data.copy_(A[0]); b.load_state_dict(a.state_dict())
    for t in range(3): A[0].grad = B[0].grad = torch.ones_like(A[0])*t; a.step(); b.step()
    assert torch.equal(A[0], B[0])

# ---- size ----------------------------------------------------------------------------------------------------------------

@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_properties(0).total_memory < 60e9, reason='needs 60 GB of GPU memory')
def test_beyond_2_31_elements():
    "A14: the last elements as if they stood alone"
    n = 2**31 + 8
    p = torch.nn.Parameter(torch.empty(n, device=DEV).uniform_(-1, 1)); p.grad = torch.empty(n, device=DEV).uniform_(-1, 1)
    ends = [slice(0, 9000), slice(n-9000, n)]
    Q = [torch.nn.Parameter(p.detach()[s].clone()) for s in ends]
    for q, s in zip(Q, ends): q.grad = p.grad[s].clone()
    a, b = AdamW([p], max_norm=1e9), AdamW(Q)
    a.step(); b.step()
    assert all(torch.equal(p.detach()[s], q) for q, s in zip(Q, ends)) and a.norm.item() == pytest.approx(math.sqrt(n/3), rel=1e-4)
    c = torch.empty(n, device=DEV, dtype=torch.bfloat16); a.add_copy(p, c); a.step()
    assert torch.equal(c[-9000:], p.detach()[-9000:].bfloat16()) and torch.equal(c[:9000], p.detach()[:9000].bfloat16())

def test_a_float64_among_others():
    "Goes through torch's routine, as all of them then do"
    P = [torch.nn.Parameter(torch.ones(5, device=DEV, dtype=d)) for d in (torch.float32, torch.float64, torch.bfloat16)]; Q = [torch.nn.Parameter(p.detach().double().clone()) for p in P]
    a, b = AdamW(P, max_norm=1.), AdamW(Q, max_norm=1.)
    for t in range(3):
        for p, q in zip(P, Q): p.grad = torch.full_like(p, t+1.); q.grad = torch.full_like(q, t+1.)
        a.step(); b.step()
    assert all(torch.allclose(a.state[p].get('master', p).double(), q, rtol=1e-6) for p, q in zip(P, Q))

def test_a_step_count_or_a_copy_on_another_device_is_refused():
    ns, x = kernels('adamw'), torch.ones(3, device=DEV)
    def call(step, copies): ns.adamw_([x], [x], [torch.zeros_like(x)], [torch.zeros_like(x)], copies, [step], [1], torch.zeros(1, 5, dtype=torch.float64), None, None, math.inf, None, 0)
    for step, copies in ((torch.zeros(()), []), (torch.zeros((), device=DEV), [torch.ones(3, dtype=torch.bfloat16)])):
        with pytest.raises(RuntimeError, match='is on another device'): call(step, copies)

def test_a_hundred_runs():
    def run():
        P = params([(70_001,), (300, 7)]); opt = AdamW(P, max_norm=.3)
        for p in P: p.grad = torch.linspace(-1, 1, p.numel(), device=DEV).view(p.shape)
        opt.step(); opt.step()
        return torch.cat([p.detach().flatten() for p in P])
    first = run()
    assert all(torch.equal(run(), first) for _ in range(99))
