"AdamW on a CPU: torch's bits, the kernel's own code compiled for the CPU, faults (A17, B12), strides, state, checkpoints."
import copy, math, os, random, shutil
import numpy as np, pytest, torch
from safetensors.torch import load_file
from xtrain import optim as O
from xtrain.checkpoint import load_checkpoint, save_checkpoint
from xtrain.config import ModelConfig
from xtrain.kernels import csrc_path, load_source
from xtrain.model import TinyTransformer
from xtrain.optim import AdamW, adamw_ref, clip_grads
from xtrain.recipe import TrainConfig
from xtrain.train import make_optimizer

def params(shapes, seed=0, dtype=torch.float32):
    rnd = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(s, generator=rnd).to(dtype)) for s in shapes]

def clones(P): return [torch.nn.Parameter(p.detach().clone(memory_format=torch.preserve_format)) for p in P]
def state(opt): return [v for g in opt.param_groups for p in g['params'] for v in (p, *opt.state[p].values())]
def equal(A, B): return len(A) == len(B) and all(map(torch.equal, A, B))

def drive(A, B, a, b, steps, scale=lambda t: 1., seed=1):
    rnd = torch.Generator().manual_seed(seed)
    for t in range(steps):
        for p, q in zip(A, B): p.grad = torch.randn(p.shape, generator=rnd)*scale(t); q.grad = p.grad.clone()
        a(t); b(t)

SETTINGS = [dict(), dict(weight_decay=0.), dict(betas=(.9, .95), weight_decay=.1, lr=3e-4), dict(betas=(.4, .9), lr=.1), dict(betas=(0., 0.)), dict(eps=1e-3)]
FULL = dict(lr=1e-3, betas=(.9, .999), eps=1e-8, weight_decay=1e-2)

# ---- the reference -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('dtype', [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize('kw', SETTINGS, ids=str)
def test_reference_has_the_bits_of_torch_single_tensor(kw, dtype):
    A = params([(1,), (7,), (33, 5), (20_011,)], dtype=dtype); B = clones(A); kw = FULL | kw
    S, opt = [(torch.zeros_like(p), torch.zeros_like(p)) for p in A], torch.optim.AdamW(B, foreach=False, fused=False, **kw)
    def ours(t):
        for p, s in zip(A, S): adamw_ref(p, p.grad.to(dtype), *s, t+1, kw['lr'], *kw['betas'], kw['eps'], kw['weight_decay'])
    rnd = torch.Generator().manual_seed(1)
    for t in range(60):
        for p, q in zip(A, B): p.grad = (torch.randn(p.shape, generator=rnd)*10.**(t % 5 - 2)).to(dtype); q.grad = p.grad.clone()
        ours(t); opt.step()
        for p, q, s in zip(A, B, S): assert torch.equal(p, q) and torch.equal(s[0], opt.state[q]['exp_avg']) and torch.equal(s[1], opt.state[q]['exp_avg_sq']), t+1

def test_reference_against_float64():
    A = params([(5000,)]); B = [torch.nn.Parameter(p.detach().double()) for p in A]; M = [[torch.zeros_like(p) for _ in range(2)] for p in (*A, *B)]
    rnd = torch.Generator().manual_seed(1)
    for t in range(100):
        g = torch.randn(5000, generator=rnd)
        adamw_ref(A[0], g, *M[0], t+1, weight_decay=.1); adamw_ref(B[0], g.double(), *M[1], t+1, weight_decay=.1)
    assert (A[0]-B[0]).norm()/B[0].norm() < 5e-6      # 1 - lr*decay is rounded, the same way a hundred times

# ---- the optimizer as it trains on a CPU -----------------------------------------------------------------------------

@pytest.mark.parametrize('kw', SETTINGS, ids=str)
def test_bits_of_torch_fused(kw):
    A = params([(1,), (7,), (33, 5), (20_011,)]); B = clones(A); a, b = AdamW(A, **kw), torch.optim.AdamW(B, fused=True, **kw)
    drive(A, B, lambda t: a.step(), lambda t: b.step(), 40, lambda t: 10.**(t % 5 - 2))
    assert all(torch.equal(p, q) and all(torch.equal(a.state[p][k], v) for k, v in b.state[q].items()) for p, q in zip(A, B))

def test_clipping_is_that_of_two_passes():
    A = params([(600,), (3, 11)]); B = clones(A); a, b = AdamW(A, max_norm=.5), torch.optim.AdamW(B, fused=True)
    def two(t): clip_grads([q.grad for q in B], .5); b.step()
    drive(A, B, lambda t: a.step(), two, 30, lambda t: 1e-3 if t % 3 else 1.)
    assert equal(A, B)

def test_groups_and_parameters_without_gradients():
    A = params([(100,), (50, 3), (70,)]); B = clones(A)
    groups = lambda P: [dict(params=P[:1], lr=1e-2, weight_decay=.3), dict(params=P[1:2], betas=(.5, .6)), dict(params=P[2:], eps=1e-2)]
    a, b = AdamW(groups(A)), torch.optim.AdamW(groups(B), fused=True)
    for t in range(12):
        for p, q in zip(A, B): p.grad = torch.full_like(p, .1*t); q.grad = p.grad.clone()
        if t % 2: A[1].grad = B[1].grad = None
        if t == 6: a.param_groups[0]['lr'] = b.param_groups[0]['lr'] = .5
        a.step(); b.step()
    assert equal(A, B) and [a.state[p]['step'].item() for p in A] == [12, 6, 12]

@pytest.mark.parametrize('make', [lambda: torch.randn(40, 30).t(), lambda: torch.randn(40, 30)[:, :7], lambda: torch.randn(101)[1:], lambda: torch.randn(0, 3), lambda: torch.randn(()), lambda: torch.randn(8, 6)[::2, ::3]], ids=['transposed', 'gaps', 'offset', 'empty', 'scalar', 'strided'])
@pytest.mark.parametrize('order', ['own', 'other', 'expanded'])
def test_any_stride(make, order):
    "torch's fused routine walks over memory from the first address on, whatever the strides are"
    torch.manual_seed(0); p = make(); whole = p._base if p._base is not None else p
    A, B = [torch.nn.Parameter(p)], [torch.nn.Parameter(p.detach().clone().contiguous())]
    used = torch.zeros_like(whole, dtype=torch.bool).as_strided(p.shape, p.stride(), p.storage_offset()).fill_(True)._base
    before, a, b = whole.clone(), AdamW(A), torch.optim.AdamW(B, foreach=False, fused=False)
    for _ in range(4):
        g = torch.randn(p.shape) if order != 'expanded' else torch.ones(()).expand(p.shape)
        A[0].grad = torch.empty_like(A[0]).copy_(g) if order == 'own' else g.clone() if order == 'other' else g
        B[0].grad = g.clone(); a.step(); b.step()
    assert torch.allclose(A[0], B[0], rtol=1e-6, atol=1e-7)
    if used is not None: assert torch.equal(whole[~used], before[~used])

def test_closure_scheduler_and_copying():
    p = params([(10,)])[0]; opt = AdamW([p], lr=1., max_norm=1.); sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda t: .1**t)
    def loss(): opt.zero_grad(); l = p.square().sum(); l.backward(); return l
    assert opt.step(loss).item() > 0 and opt.norm > 0
    sched.step(); assert opt.param_groups[0]['lr'] == pytest.approx(.1)
    q, other = copy.deepcopy((p, opt)); q.grad = p.grad.clone()
    opt.step(); other.step(); assert equal([p], [q]) and other.max_norm == 1.

@pytest.mark.parametrize('kw,name', [(dict(lr=-1.), 'lr'), (dict(betas=(1., .9)), 'betas'), (dict(betas=(.9, -1.)), 'betas'), (dict(eps=-1.), 'eps'), (dict(weight_decay=-1.), 'weight_decay'), (dict(max_norm=0.), 'max_norm'), (dict(max_norm=math.nan), 'max_norm'), (dict(lr=math.nan), 'lr')])
def test_bad_settings_are_named(kw, name):
    with pytest.raises(ValueError, match=f'^{name}='): AdamW(params([(2,)]), **kw)

@pytest.mark.parametrize('kw,say', [(dict(lr=-1.), '^lr='), (dict(betas=(.9, 1.)), '^betas='), (dict(eps=-1.), '^eps='), (dict(weight_decay=math.nan), '^weight_decay='), (dict(amsgrad=True), 'amsgrad is not supported'), (dict(maximize=True), 'maximize is not supported')])
def test_bad_settings_of_a_group_are_named(kw, say):
    with pytest.raises(ValueError, match=say): AdamW([dict(params=params([(2,)])), dict(params=params([(2,)]), **kw)])
    opt = AdamW(params([(2,)]))
    with pytest.raises(ValueError, match=say): opt.add_param_group(dict(params=params([(2,)]), **kw))

def test_no_gradients_have_no_length(): assert O.grad_norm([]) == 0 and clip_grads([], 1.) == 0

@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_a_copy_of_what_is_a_copy_is_refused(dtype):
    "It would be written instead of the parameter, which then stands still"
    p = torch.nn.Parameter(torch.ones(3, dtype=dtype)); opt = AdamW([p], lr=.1)
    with pytest.raises(ValueError, match='itself the copy that is written'): opt.add_copy(p, torch.zeros(3))
    p.grad = torch.ones_like(p); opt.step(); assert (p < 1).all()

def test_sparse_gradients_are_refused():
    p = torch.nn.Parameter(torch.ones(3, 2)); p.grad = torch.zeros(3, 2).to_sparse()
    with pytest.raises(ValueError, match='dense'): AdamW([p]).step()

# ---- small updates, NaN, overflow --------------------------------------------------------------------------------------

@pytest.mark.parametrize('dtype,want', [(torch.float64, .9400000), (torch.float32, .9400020), (torch.bfloat16, .94140625), (torch.float16, .93994140625)])
def test_small_updates_are_not_lost(dtype, want):
    "A17"
    p = torch.nn.Parameter(torch.ones(1, dtype=dtype)); opt = AdamW([p], lr=6e-4, betas=(.9, .95), weight_decay=0.)
    for _ in range(100): p.grad = torch.ones_like(p); opt.step()
    assert p.item() == pytest.approx(want, abs=1e-7) and opt.state[p].get('master', p).item() == pytest.approx(.940001, abs=1.1e-6)

def test_the_trainers_default_moves_gains_in_bfloat16():
    "A17: norm gains are 1, and move in a bfloat16 run"
    m = TinyTransformer(ModelConfig(60, 16, 1, 2, 1, 8, 24, 32), seed=0, dtype=torch.bfloat16); opt = make_optimizer(m, TrainConfig(lr=6e-4))
    for k in range(30):
        for g in opt.param_groups: g['lr'] = 6e-4
        ids = (torch.arange(17)[None]*7 + k) % 60; m.loss(ids[:, :-1], ids[:, 1:]).backward(); opt.step(); opt.zero_grad()
    assert all(p.dtype == torch.float32 and (p != 1).any() and (p-1).abs().max() < .1 for n, p in m.params().items() if n.endswith('norm'))

@pytest.mark.parametrize('bad', [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize('hold', [False, True])
def test_not_finite_changes_nothing(bad, hold):
    "B12 (2)"
    P = params([(500,), (12, 12)]); opt = AdamW(P, max_norm=1., hold=hold); c = torch.zeros(500, dtype=torch.bfloat16); opt.add_copy(P[0], c)
    for p in P: p.grad = torch.randn_like(p)
    opt.step(); was = [x.detach().clone() for x in (*state(opt), c)]
    P[1].grad[3, 3] = bad; opt.step()
    assert not opt.norm.isfinite() and equal(was, [x.detach() for x in (*state(opt), c)])
    P[1].grad[3, 3] = 1.; opt.step()
    assert opt.norm.isfinite() and torch.equal(was[0], P[0]) == hold
    if hold: assert opt.stop.item() == 1; opt.stop.zero_(); opt.step(); assert not torch.equal(was[0], P[0])

@pytest.mark.parametrize('size,want', [(1e20, 1e21), (3e38, 3e39), (1e-30, 1e-29)])
def test_norm_of_huge_and_tiny(size, want):
    "B12 (1)"
    p = params([(100,)])[0]; p.grad = torch.full((100,), size); opt = AdamW([p], max_norm=1.); opt.step()
    m = opt.state[p]['exp_avg']
    assert opt.norm.item() == pytest.approx(want, rel=1e-3 if size < 1 else 1e-6) and torch.allclose(m, torch.full_like(m, .1*min(size, .1)), rtol=1e-5)

# ---- state -------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float64])
def test_state_dict_goes_on_bit_for_bit(dtype):
    A = params([(100,), (20, 3)], dtype=dtype); B = clones(A); a, b = AdamW(A, lr=.1, max_norm=1.), AdamW(B, max_norm=1.)
    def grads(P, t):
        for k, p in enumerate(P): p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10*t+k)).to(dtype)
    for t in range(5): grads(A, t); a.step()
    for p, q in zip(A, B): q.data.copy_(p)
    b.load_state_dict(copy.deepcopy(a.state_dict()))
    for t in range(5, 10): grads(A, t); grads(B, t); a.step(); b.step()
    assert equal(state(a), state(b)) and b.param_groups[0]['lr'] == .1

@pytest.mark.parametrize('fused', [False, True])
def test_state_of_torch_is_taken(fused):
    A = params([(100,)]); B = clones(A); a, b = torch.optim.AdamW(A, lr=.1, fused=fused), AdamW(B)
    for t in range(3): A[0].grad = torch.ones_like(A[0])*t; a.step()
    B[0].data.copy_(A[0]); b.load_state_dict(a.state_dict())
    for t in range(3): A[0].grad = torch.ones_like(A[0])*t; B[0].grad = A[0].grad.clone(); a.step(); b.step()
    assert torch.allclose(A[0], B[0], atol=1e-7) and b.state[B[0]]['step'] == 6
    with pytest.raises(ValueError, match='amsgrad'): b.load_state_dict(torch.optim.AdamW(A, amsgrad=True).state_dict())

def test_checkpoint_holds_masters_and_older_ones_load(tmp_path):
    "A17: a resume does not round; a checkpoint of torch's fused AdamW, as earlier versions wrote it, goes on"
    cfg = ModelConfig(60, 16, 1, 2, 1, 8, 24, 32)
    def train(m, opt, n):
        for k in range(n):
            ids = (torch.arange(17)[None]*7 + k) % 60; m.loss(ids[:, :-1], ids[:, 1:]).backward(); opt.step(); opt.zero_grad()
    for name, make, dtype in (('ours', AdamW, torch.float32), ('old', lambda p, **kw: torch.optim.AdamW(p, fused=True, **kw), torch.float32), ('bf16', AdamW, torch.bfloat16)):
        m = TinyTransformer(cfg, seed=0).to(dtype); m.dtype = dtype; opt = make(m.parameters(), lr=1e-2); train(m, opt, 3)
        path = save_checkpoint(tmp_path/name, 3, m, opt); files = load_file(path/'optimizer.safetensors')
        assert {k.split('.')[0] for k in files} == {'step', 'exp_avg', 'exp_avg_sq'} | ({'master'} if name == 'bf16' else set()) and all(v.dtype == torch.float32 for v in files.values())
        n = TinyTransformer(cfg, seed=1).to(dtype); n.dtype = dtype; other = AdamW(n.parameters(), lr=1e-2); load_checkpoint(path, n, other)
        train(m, opt, 3); train(n, other, 3)
        assert equal(list(m.parameters()), list(n.parameters())), name

def test_state_replaced_behind_its_back_is_seen():
    P = params([(50,), (20,)]); Q = clones(P); a, b = AdamW(P), AdamW(Q)
    for k in range(4):
        for p, q in zip(P, Q): p.grad = torch.ones_like(p); q.grad = torch.ones_like(q)
        a.step(); b.step()
        for p in P: a.state[p] = {n: v.clone() for n, v in a.state[p].items()} if k % 2 else a.state[p]; a.state[p]['exp_avg'] = a.state[p]['exp_avg'].clone(); p.data = p.data.clone()
    assert equal(state(a), state(b))

# ---- the kernel's own code, compiled for the CPU ----------------------------------------------------------------------

needs_cxx = pytest.mark.skipif(not (os.environ.get('CXX') or shutil.which('c++') or shutil.which('g++') or shutil.which('clang++')), reason='no C++ compiler')

@pytest.fixture(scope='module')
def ns():
    return load_source(csrc_path()/'adamw.cu', gpu=False)

@pytest.fixture
def kernel(ns, monkeypatch):
    "The optimizer on its way to the kernel, on the CPU"
    monkeypatch.setattr(O, 'cuda_ops', lambda name, x: ns if x.dtype in (torch.float32, torch.bfloat16, torch.float16) else None)
    monkeypatch.setattr(O, '_divides', lambda device: 0)

def emulate(p, m, v, g, t, lr, b1, b2, eps, decay, divides, clip=1.):
    "The GPU's order of operations, one rounding a line, products and sums of a fused one exact"
    f, fma = np.float32, lambda a, b, c: (np.longdouble(a)*b + c).astype(np.float32)
    g = g*f(clip); p = p*f(1-lr*decay); w = f(1-b1)
    m = fma(w, g-m, m) if w < .5 else fma(-(g-m), f(1)-w, g)
    v = fma(f(1-b2), g*g, v*f(b2))
    root, s = (1-b2**t)**.5, np.sqrt(v)
    s = (s/f(root), s*(f(1)/f(root)), s*f(1/root))[divides]
    return fma(f(-lr/(1-b1**t)), m/(s+f(eps)), p), m, v

@needs_cxx
@pytest.mark.parametrize('divides', [0, 1, 2])
def test_kernel_arithmetic(ns, divides):
    r = random.Random(divides)
    for case in range(25):
        n, rnd = r.choice((1, 3, 100, 2000)), np.random.default_rng(case)
        lr, b1, b2, eps, decay = 10**r.uniform(-5, 0), r.choice((0., .3, .5, .9, .99)), r.choice((.5, .95, .999)), 10**r.uniform(-12, -2), r.choice((0., .01, .5))
        p, m, v = rnd.standard_normal(n).astype('f'), np.zeros(n, 'f'), np.zeros(n, 'f'); T = [torch.from_numpy(x.copy()) for x in (p, m, v)]
        start = r.choice((0, 0, 10, 12345)); step = torch.tensor(float(start))
        for t in range(start+1, start+5):
            g = (rnd.standard_normal(n)*10.**r.uniform(-3, 3)).astype('f')
            clip = r.choice((math.inf, 1.)); norm = ns.grad_norm([torch.from_numpy(g)])
            assert norm.item() == pytest.approx(math.sqrt((g.astype('d')**2).sum()), rel=1e-14)
            p, m, v = emulate(p, m, v, g, t, lr, b1, b2, eps, decay, divides, min(1., clip/norm.item()))
            ns.adamw_(T[:1], [torch.from_numpy(g)], T[1:2], T[2:], [], [step], [1], torch.tensor([[lr, b1, b2, eps, decay]], dtype=torch.float64), None, norm, clip, None, divides)
            for x, y in zip(T, (p, m, v)): assert np.array_equal(x.numpy(), y)
        assert step.item() == start+4

@needs_cxx
def test_the_way_to_the_kernel(kernel):
    "Groups, odd strides, masters, copies, clipping: as torch's routine, within its other rounding"
    for odd in (False, True):
        A = params([(60,), (30, 7), (5, 4, 3), (9,)]) + [torch.nn.Parameter(torch.randn(6, 8, generator=torch.Generator().manual_seed(5)).t())]
        if odd: A.append(torch.nn.Parameter(torch.randn(10, 10, generator=torch.Generator().manual_seed(6))[:, :4]))
        B = clones(A); groups = lambda P: [dict(params=P[:2], weight_decay=.3), dict(params=P[2:], lr=1e-2, betas=(.4, .9))]
        a, b = AdamW(groups(A), max_norm=2.), torch.optim.AdamW(groups(B), foreach=False, fused=False); c = torch.empty_like(A[1], dtype=torch.bfloat16); a.add_copy(A[1], c)
        def torch_way(t): clip_grads([q.grad for q in B], 2.); b.step()
        drive(A, B, lambda t: a.step(), torch_way, 25, lambda t: 10.**(t % 3 - 1))
        assert all(torch.allclose(p, q, rtol=1e-5, atol=1e-6) for p, q in zip(A, B)) and torch.equal(c, A[1].bfloat16())
    P = params([(40,), (5, 5)], dtype=torch.bfloat16); M = [torch.nn.Parameter(p.detach().float()) for p in P]; a, b = AdamW(P), AdamW(M)
    for t in range(10):
        for p, m in zip(P, M): p.grad = torch.full_like(p, t/7); m.grad = p.grad.float()
        a.step(); b.step()
    assert all(torch.equal(a.state[p]['master'], m) and torch.equal(p, m.bfloat16()) for p, m in zip(P, M))

@needs_cxx
@pytest.mark.parametrize('dtypes', [(torch.float32, torch.float64), (torch.float64, torch.float32), (torch.bfloat16, torch.float64)])
def test_a_float64_among_others_is_not_shown_to_the_kernel(kernel, dtypes):
    A = [torch.nn.Parameter(torch.ones(5, dtype=d)) for d in dtypes]; B = [torch.nn.Parameter(p.detach().double().clone()) for p in A]
    a, b = AdamW(A, max_norm=1.), AdamW(B, max_norm=1.)
    for t in range(3):
        for p, q in zip(A, B): p.grad = torch.full_like(p, t+1.); q.grad = p.grad.double().clone()
        a.step(); b.step()
    assert all(torch.allclose(a.state[p].get('master', p).double(), q, rtol=1e-6) for p, q in zip(A, B)) and a.norm.item() == pytest.approx(b.norm.item(), rel=1e-6)
    P = params([(4,)]); c = torch.zeros(4, dtype=torch.float64); opt = AdamW(P); opt.add_copy(P[0], c); P[0].grad = torch.ones(4); opt.step(); assert torch.equal(c, P[0].double())

@needs_cxx
@pytest.mark.skipif(not hasattr(torch.Tensor, 'grad_dtype'), reason='gradients have the dtype of their parameter in this torch')
def test_a_gradient_wider_than_its_parameter(kernel):
    "`grad_dtype` lets float64 come in; the kernel reads float32 and shorter"
    for d, g in ((torch.float32, torch.float64), (torch.bfloat16, torch.float64), (torch.bfloat16, torch.float32)):
        p, q = torch.nn.Parameter(torch.ones(5, dtype=d)), torch.nn.Parameter(torch.ones(5))
        p.grad_dtype = g
        a, b = AdamW([p], max_norm=1.), AdamW([q], max_norm=1.)
        for t in range(3):
            p.grad, q.grad = torch.full((5,), t+1., dtype=g), torch.full((5,), t+1.)
            a.step(); b.step()
        assert torch.allclose(a.state[p].get('master', p), q, rtol=1e-6) and p.dtype == d

def test_complex_parameters_are_refused():
    p = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64)); p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match='params: parameters must be floating-point, got torch.complex64'): AdamW([p]).step()

@pytest.mark.parametrize('copies', [False, True])
def test_torchs_routine_gets_one_dtype_at_a_time(monkeypatch, copies):
    "On a GPU it refuses lists of several (`check_fast_path_restrictions`), which a CPU takes"
    f, seen = torch._fused_adamw_, []
    def strict(*lists, **kw): kinds = {t.dtype for l in lists[:4] for t in l}; seen.append(kinds); assert len(kinds) == 1 and lists[0]; return f(*lists, **kw)
    monkeypatch.setattr(torch, '_fused_adamw_', strict)
    A = [torch.nn.Parameter(torch.ones(n, dtype=d)) for n, d in enumerate((torch.float32, torch.float64, torch.bfloat16, torch.float64, torch.float16), 3)]
    B = [torch.nn.Parameter(p.detach().double().clone()) for p in A]
    a, b = (AdamW([dict(params=P[:2], weight_decay=.3), dict(params=P[2:], lr=1e-2)], max_norm=1.) for P in (A, B))
    if copies: a.add_copy(A[0], c := torch.zeros(3, dtype=torch.float64))
    for t in range(3):
        for p, q in zip(A, B): p.grad = torch.full_like(p, t+1.); q.grad = p.grad.double().clone()
        a.step(); b.step()
    assert all(torch.allclose(a.state[p].get('master', p).double(), q, rtol=1e-6) for p, q in zip(A, B)) and {torch.float32} in seen and {torch.float64} in seen
    assert not copies or torch.equal(c, A[0].double())

@needs_cxx
def test_the_kernels_rate_may_be_a_tensor_and_nan_holds(kernel):
    P = params([(500,), (12, 12)]); opt = AdamW(P, max_norm=1., hold=True)
    for p in P: p.grad = torch.randn_like(p)
    opt.step(); was = [x.detach().clone() for x in state(opt)]
    P[1].grad[3, 3] = math.nan; opt.step(); P[1].grad[3, 3] = 0.; opt.step()
    assert equal(was, [x.detach() for x in state(opt)]) and opt.stop == 1

@needs_cxx
def test_state_replaced_is_seen_on_the_way_to_the_kernel(kernel): test_state_replaced_behind_its_back_is_seen()

@needs_cxx
def test_wrong_lists_are_refused(ns):
    x, one, h = torch.ones(3), torch.zeros(()), torch.zeros(1, 5, dtype=torch.float64)
    def call(params=(x,), grads=(x,), ends=(1,), hyper=h, copies=()): ns.adamw_(list(params), list(grads), [torch.zeros(3)], [torch.zeros(3)], list(copies), [one], list(ends), hyper, None, None, math.inf, None, 0)
    for kw, say in ((dict(grads=()), 'different length'), (dict(ends=(2,)), 'do not cover'), (dict(grads=(torch.ones(4),)), 'differ in size'), (dict(params=(x.double(),)), 'float32'), (dict(hyper=h.float()), 'float64'), (dict(copies=(torch.ones(3, 1).bfloat16(),)), 'differs from its master'), (dict(grads=(x.double(),)), 'float32, bfloat16 or float16')):
        with pytest.raises(RuntimeError, match=say): call(**kw)
