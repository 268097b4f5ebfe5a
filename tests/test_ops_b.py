"""RoPE, attention and cross-entropy against independent code: torch's autograd on the definition, transformers' own functions, torch's own ops."""
import gc, itertools, math, random, time, types, warnings

import pytest, torch, torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from hypothesis import given, settings, strategies as st

from xtrain.gradcheck import gradcheck, rel_error
from xtrain.ops import cross_entropy as ce
from xtrain.ops.attention import PATHS, attention, attention_grad, attention_path, attention_ref, causal_mask
from xtrain.ops.cross_entropy import cross_entropy, cross_entropy_grad, cross_entropy_ref, linear_cross_entropy, loss_and_grads
from xtrain.ops.rope import rope, rope_grad, rope_ref, rope_tables

quick = settings(max_examples=25, deadline=None, derandomize=True, database=None)
F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
TOL = {F64: 1e-12, F32: 3e-6, torch.float16: 2e-3, BF16: 1.2e-2}


@pytest.fixture(autouse=True)
def seeded():
    n = torch.get_num_threads()
    torch.set_num_threads(1); torch.manual_seed(0)
    yield
    torch.set_num_threads(n)


def acc(x): return x if x.dtype == F64 else x.float()
def close(a, b, tol): assert a.shape == b.shape and rel_error(a, b) <= tol or a.numel() == 0 or (not a.any() and not b.any()), (rel_error(a, b), tol)
def grads(f, *xs, g=None):
    out = f(*xs)
    return out, torch.autograd.grad(out, xs, g)
def leaf(*shape, dtype=F32): return torch.randn(shape).to(dtype).requires_grad_()
def compiled(f, **kw):
    torch._dynamo.reset()
    return torch.compile(f, fullgraph=True, backend='aot_eager', **kw)


# --- cross-entropy -----------------------------------------------------------------------------------------------------------

Z, DZ = [0., 1., 2., 3.], torch.tensor([0.0320586, -0.9128557, 0.2368828, 0.6439143])

@quick
@given(N=st.integers(0, 40), V=st.sampled_from([1, 2, 7, 63, 301]), dtype=st.sampled_from([F64, F32, BF16]), ignored=st.floats(0, 1),
       reduction=st.sampled_from(['none', 'sum', 'mean']), ignore=st.sampled_from([-100, -1, 0]), seed=st.integers(0, 99))
def test_cross_entropy_is_torchs(N, V, dtype, ignored, reduction, ignore, seed):
    torch.manual_seed(seed)
    t = torch.randint(V, (N,)); t[torch.rand(N) < ignored] = ignore
    z = (3*torch.randn(N, V)).to(dtype).requires_grad_()
    before = z.detach().clone()
    ours = cross_entropy(z, t, ignore, reduction)
    assert torch.equal(ours, cross_entropy_ref(z, t, ignore, reduction)) and torch.equal(z, before)
    want = F.cross_entropy(acc(z), t, ignore_index=ignore, reduction='none')
    want = want if reduction == 'none' else want.sum()/(1 if reduction == 'sum' else max(1, (t != ignore).sum()))
    assert torch.allclose(ours, want, atol=TOL[acc(z).dtype], rtol=TOL[acc(z).dtype]) and ours.dtype == acc(z).dtype
    g = torch.randn_like(ours)
    a, = torch.autograd.grad(ours, z, g); b, = torch.autograd.grad(want, z, g)
    assert a.dtype == dtype and torch.allclose(a.float(), b.float(), atol=1e-6, rtol=TOL[dtype])
    assert not a[t == ignore].any() and torch.equal(a, cross_entropy_grad(z.detach(), t, g, ignore, reduction))


def theirs(z, t, ignore=-100, reduction='mean', weight=None, z_loss=0., softcap=0.):
    "The options, written with torch's own functions"
    z = acc(z)
    if softcap: z = softcap*torch.tanh(z/softcap)
    l = F.cross_entropy(z, t, ignore_index=ignore, reduction='none') + z_loss*z.logsumexp(-1)**2*(t != ignore)
    w = (torch.ones_like(l) if weight is None else weight.to(l.dtype))*(t != ignore)
    if reduction == 'none': return l*w
    return (l*w).sum()/(1 if reduction == 'sum' or not w.sum() else w.sum())

OPTIONS = [{}, dict(z_loss=.1), dict(softcap=3.), dict(z_loss=.02, softcap=10.)]

@quick
@given(N=st.integers(0, 20), V=st.sampled_from([1, 2, 63, 301]), dtype=st.sampled_from([F64, F32, BF16]), ignored=st.sampled_from([0., .4]), options=st.sampled_from(OPTIONS), weighted=st.booleans(),
       reduction=st.sampled_from(['none', 'sum', 'mean']), linear=st.booleans(), rows=st.sampled_from([8, 10**6]), seed=st.integers(0, 99))
def test_options(N, V, dtype, ignored, options, weighted, reduction, linear, rows, seed):
    torch.manual_seed(seed)
    if linear and reduction == 'none': reduction = 'sum'
    t = torch.randint(V, (N,)); t[torch.rand(N) < ignored] = -100
    weight = torch.randn(N) if weighted else None
    if weighted and reduction == 'mean': weight = weight.abs()
    if weighted: weight[:N//3] = 0
    kw = dict(reduction=reduction, weight=weight, **options)
    kept, ce.CHUNK_BYTES['cpu'] = ce.CHUNK_BYTES['cpu'], rows*V*8
    try:
        if linear:
            xs = leaf(N, 5, dtype=dtype), torch.randn(V, 5).to(dtype).t().requires_grad_()
            f, g = lambda h, w: linear_cross_entropy(h, w, t, **kw), lambda h, w: theirs(h @ w, t, **kw)
        else:
            xs = (2*torch.randn(N, V)).to(dtype).requires_grad_(),
            f, g = lambda z: cross_entropy(z, t, **kw), lambda z: theirs(z, t, **kw)
        a, b = f(*xs), g(*(x.detach().double().requires_grad_() for x in xs))
        d = torch.randn_like(a)
        ours = a, *torch.autograd.grad(a, xs, d)
        x64 = [x.detach().double().requires_grad_() for x in xs]
        b = g(*x64)
        for x, y in zip(ours, (b, *torch.autograd.grad(b, x64, d.double()))): assert torch.allclose(x.double(), y, atol=10*TOL[dtype]*max(1., float(y.detach().abs().max()) if y.numel() else 1.), rtol=10*TOL[dtype])
        if not linear: assert torch.equal(a, cross_entropy_ref(*xs, t, **kw)) and torch.equal(ours[1], cross_entropy_grad(xs[0].detach(), t, d, **kw))
        with torch.no_grad(): assert torch.equal(f(*xs), a)
    finally: ce.CHUNK_BYTES['cpu'] = kept


@pytest.mark.parametrize('options', OPTIONS + [dict(weight=torch.tensor([1., 0., 2., -1., .5]).double())])
def test_options_gradcheck(options):
    t = torch.tensor([3, 0, 10, -100, 3])
    h, w = torch.randn(5, 3).double(), torch.randn(3, 11).double()
    k = options.get('weight'), options.get('z_loss', 0.), options.get('softcap', 0.)
    gradcheck(lambda h, w: linear_cross_entropy(h, w, t, reduction='sum', **options), lambda h, w, g: tuple(x*g for x in loss_and_grads(h, w, t, -100, True, True, *k)[2:]), h, w)
    for r in ('none', 'sum', 'mean'):
        gradcheck(lambda z: cross_entropy(z, t, reduction=r, **options), lambda z, g: cross_entropy_grad(z, t, g, reduction=r, **options), 2*torch.randn(5, 11).double())


def test_a_weight_counts_tokens():
    "Weight 2 is the token twice, weight 0 is a token that is not scored, whatever it holds"
    h, w, t = torch.randn(4, 6), torch.randn(6, 9), torch.tensor([1, 8, 0, 3])
    for f in (lambda h, t, **k: linear_cross_entropy(h, w, t, **k), lambda h, t, **k: cross_entropy(h @ w, t, **k)):
        assert torch.allclose(f(h, t, weight=torch.tensor([2., 1., 0., 3.])), f(h[[0, 0, 1, 3, 3, 3]], t[[0, 0, 1, 3, 3, 3]]))
        assert torch.equal(f(h, t, weight=torch.ones(4)), f(h, t))
        bad = h.clone(); bad[2] = math.nan
        bad.requires_grad_()
        loss = f(bad, t, weight=torch.tensor([1, 1., 0, 1])); loss.backward()
        assert torch.allclose(loss, f(h[[0, 1, 3]], t[[0, 1, 3]])) and bad.grad.isfinite().all() and not bad.grad[2].any()
        assert f(h, t, weight=torch.zeros(4)) == 0
        assert f(h, torch.where(t == 0, 99, t).where(t != 0, -100), weight=torch.ones(4)).isfinite()


def test_soft_cap_keeps_the_gradient_finite_far_out():
    z = torch.tensor([[1e30, -1e30, 0., -math.inf]], requires_grad=True)
    loss = cross_entropy(z, torch.tensor([2]), softcap=30.); loss.backward()
    assert abs(loss.item()-30) < 1e-4 and z.grad.isfinite().all()


@pytest.mark.parametrize('f', [lambda z, t, **k: cross_entropy(z, t, **k), lambda z, t, **k: linear_cross_entropy(z, torch.eye(z.shape[-1], dtype=z.dtype), t, **k)], ids=['logits', 'linear'])
class TestEdges:
    def test_common_offset(self, f):
        for c in (0, 1e3, 1e4, -1e4, 1e6):
            z = (torch.tensor([Z])+c).requires_grad_()
            loss = f(z, torch.tensor([1])); loss.backward()
            assert abs(loss.item() - 2.4401897) < 1e-6 and (z.grad[0]-DZ).abs().max() < 1e-6

    def test_hopeless_guess(self, f):
        assert f(torch.tensor([[100., 0.]]), torch.tensor([1])).item() == 100
        assert f(torch.tensor([[200., 0.]]).bfloat16(), torch.tensor([1])).item() == 200

    def test_nothing_to_score(self, f):
        z = torch.randn(5, 7, requires_grad=True)
        loss = f(z, torch.full((5,), -100)); loss.backward()
        assert loss.item() == 0 and torch.equal(z.grad, torch.zeros(5, 7))

    def test_one_token_vocabulary(self, f):
        z = torch.randn(4, 1, requires_grad=True)
        loss = f(z, torch.zeros(4, dtype=torch.long)); loss.backward()
        assert loss.item() == 0 and not z.grad.any()

    def test_empty_batch(self, f):
        z = torch.randn(0, 7, requires_grad=True)
        loss = f(z, torch.zeros(0, dtype=torch.long)); loss.backward()
        assert loss.item() == 0 and z.grad.shape == (0, 7)

    def test_incoming_gradient_and_company(self, f):
        z = torch.tensor([Z], requires_grad=True); t = torch.tensor([1])
        loss, kept = f(z, t), z.detach().clone()
        for _ in range(2): assert torch.allclose(torch.autograd.grad(3*loss, z, retain_graph=True)[0][0], 3*DZ, atol=1e-6)
        assert torch.allclose(torch.autograd.grad(loss + z.square().sum(), z)[0][0], DZ + 2*z.detach()[0], atol=1e-6)
        assert torch.equal(z, kept)
        assert torch.allclose(torch.autograd.grad(checkpoint(f, z, t, use_reentrant=False), z)[0][0], DZ, atol=1e-6)

    def test_second_derivative_refused(self, f):
        z = torch.tensor([Z], requires_grad=True)
        g, = torch.autograd.grad(f(z, torch.tensor([1])), z, create_graph=True)
        with pytest.raises(RuntimeError): torch.autograd.grad(g.sum(), z)

    def test_bad_arguments_are_named(self, f):
        z, t = torch.randn(2, 3, 5), torch.zeros(2, 3, dtype=torch.long)
        for bad, word in [(lambda: f(z, t[:1]), 'targets must have shape'), (lambda: f(z, t.float()), 'targets must hold integers'), (lambda: f(z.long(), t), 'must be floating-point'),
                          (lambda: f(z, t, reduction='avg'), 'reduction must be'), (lambda: f(z, torch.where(t == 0, 5, t)), r'targets: id 5 at \(0, 0\) is outside \[0, 5\)'), (lambda: f(z, t-1), 'id -1'),
                          (lambda: f(z, t, weight=torch.ones(2)), 'weight must have shape'), (lambda: f(z, t, weight=t), 'weight must be floating-point'), (lambda: f(z, t, weight=torch.ones(2, 3, requires_grad=True)), 'weight must not require a gradient'),
                          (lambda: f(z, t, z_loss=-1.), 'z_loss must be 0'), (lambda: f(z, t, softcap=-1.), 'softcap must be 0'), (lambda: f(z, t, softcap=math.nan), 'softcap must be')]:
            with pytest.raises(ValueError, match=word): bad()
        assert torch.isfinite(f(z, t.int()))


def test_forbidden_token():
    z = torch.tensor([0., -math.inf, 2., 3.], requires_grad=True)
    loss = cross_entropy(z, torch.tensor(2)); loss.backward()
    assert loss.isfinite() and z.grad[1] == 0 and z.grad.isfinite().all()


def test_weights_per_token():
    z, t, w = leaf(3, 5), torch.tensor([4, 0, 2]), torch.tensor([1., 0., 2.])
    a, b = (torch.autograd.grad((f(z, t, reduction='none')*w).sum(), z)[0] for f in (cross_entropy, F.cross_entropy))
    assert torch.allclose(a, b, atol=1e-6)


def test_no_gradient_for_what_is_not_scored_even_if_it_is_nan():
    z = torch.randn(3, 5); z[1] = math.nan; z.requires_grad_()
    loss = cross_entropy(z, torch.tensor([1, -100, 2])); loss.backward()
    assert loss.isfinite() and z.grad.isfinite().all() and not z.grad[1].any()


def plain(h, w, t, ignore=-100, reduction='mean'):
    l = F.cross_entropy(acc(h @ w).flatten(0, -2), t.flatten(), ignore_index=ignore, reduction='sum')
    return l if reduction == 'sum' else l/max(1, int((t != ignore).sum()))

LAYOUTS = dict(view=lambda D, V: torch.randn(V, D).t(), contiguous=lambda D, V: torch.randn(D, V), strided=lambda D, V: torch.randn(V, 2*D)[:, ::2].t())

@quick
@given(shape=st.sampled_from([(17,), (2, 9), (2, 3, 4), (1,), (90,)]), D=st.sampled_from([1, 5, 16]), V=st.sampled_from([1, 13, 301]), dtype=st.sampled_from([F64, F32, torch.float16, BF16]), layout=st.sampled_from(list(LAYOUTS)),
       ignored=st.sampled_from([0., .4]), reduction=st.sampled_from(['sum', 'mean']), rows=st.sampled_from([8, 10**6]), seed=st.integers(0, 99))
def test_linear_cross_entropy_is_the_plain_one(shape, D, V, dtype, layout, ignored, reduction, rows, seed):
    torch.manual_seed(seed)
    kept, ce.CHUNK_BYTES['cpu'] = ce.CHUNK_BYTES['cpu'], rows*V*8
    try:
        t = torch.randint(V, shape); t[torch.rand(shape) < ignored] = -100
        h, w = leaf(*shape, D, dtype=dtype), LAYOUTS[layout](D, V).to(dtype).requires_grad_()
        a, (dh, dw) = grads(lambda h, w: linear_cross_entropy(h, w, t, reduction=reduction), h, w)
        h64, w64 = h.detach().double().requires_grad_(), w.detach().double().requires_grad_()
        b, (rh, rw) = grads(lambda h, w: plain(h, w, t, reduction=reduction), h64, w64)
        c, (ph, pw) = grads(lambda h, w: plain(h, w, t, reduction=reduction), h, w)
        assert a.dtype == acc(h).dtype and dh.dtype == dw.dtype == dtype
        for x, p, r in ((a, c, b), (dh, ph, rh), (dw, pw, rw)): assert rel_error(x, r) <= max(2*rel_error(p, r), TOL[dtype]) or r.norm() < 1e-9
        if layout != 'strided': assert dw.stride() == w.stride()
    finally: ce.CHUNK_BYTES['cpu'] = kept


@pytest.mark.parametrize('h_grad,w_grad', [(1, 1), (1, 0), (0, 1), (0, 0)])
def test_only_wanted_gradients(h_grad, w_grad, monkeypatch):
    asked, op = [], ce.loss_and_grads
    monkeypatch.setattr(ce, 'loss_and_grads', lambda *a: (asked.append(a[4:6]), op(*a))[1])
    h, w, t = torch.randn(9, 4).requires_grad_(bool(h_grad)), torch.randn(4, 11).requires_grad_(bool(w_grad)), torch.randint(11, (9,))
    loss = linear_cross_entropy(h, w, t)
    assert loss.requires_grad == bool(h_grad or w_grad)
    if loss.requires_grad: loss.backward()
    assert (h.grad is not None) == bool(h_grad) and (w.grad is not None) == bool(w_grad)
    assert asked == [(bool(h_grad), bool(w_grad))]
    with torch.no_grad(): assert torch.equal(linear_cross_entropy(h, w, t), loss) and not linear_cross_entropy(h, w, t).requires_grad


def test_tied_head_gradient_lands_in_the_embedding():
    e, ids, t = leaf(23, 6), torch.randint(23, (10,)), torch.randint(23, (10,))
    a, = torch.autograd.grad(linear_cross_entropy(e[ids], e.t(), t), e)
    b, = torch.autograd.grad(F.cross_entropy(e[ids] @ e.t(), t), e)
    close(a, b, 1e-6)


def test_linear_gradcheck_and_a_wrong_one():
    t = torch.tensor([3, 0, 10, -100, 3])
    h, w = torch.randn(5, 3).double(), torch.randn(3, 11).double()
    f = lambda h, w: linear_cross_entropy(h, w, t, reduction='sum')
    right = lambda h, w, g: tuple(x*g for x in loss_and_grads(h, w, t, -100, True, True)[2:])
    gradcheck(f, right, h, w)
    with pytest.raises(AssertionError, match='relative error'): gradcheck(f, lambda h, w, g: (right(h, w, g)[0], h.t() @ (h @ w).softmax(1)*g), h, w)


def test_logits_are_never_stored():
    from torch.utils._python_dispatch import TorchDispatchMode
    largest = 0
    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(x, torch.Tensor): largest = max(largest, x.untyped_storage().nbytes())
            return out
    N, D, V = 300, 4, 50257
    h, w, t = torch.randn(N, D), torch.randn(V, D).t(), torch.randint(V, (N,))
    with Watch(): loss_and_grads._init_fn(h, w, t, -100, True, True)
    assert V*D*4 <= largest <= ce.CHUNK_BYTES['cpu'] < N*V*4/5


def test_determinism_100_runs():
    h, w, t = leaf(64, 8), leaf(8, 301), torch.randint(301, (64,))
    first = grads(lambda h, w: linear_cross_entropy(h, w, t), h, w)
    for _ in range(100):
        again = grads(lambda h, w: linear_cross_entropy(h, w, t), h, w)
        assert torch.equal(first[0], again[0]) and all(map(torch.equal, first[1], again[1]))


@pytest.mark.parametrize('options', OPTIONS)
def test_opcheck_and_compile_with_options(options):
    h, w, t, k = leaf(20, 4), torch.randn(31, 4).t().requires_grad_(), torch.randint(31, (20,)), torch.rand(20); t[3] = -100
    torch.library.opcheck(loss_and_grads, (h.detach(), w.detach(), t, -100, True, True, k, options.get('z_loss', 0.), options.get('softcap', 0.)))
    for f in (lambda h, w: linear_cross_entropy(h, w, t, weight=k, **options), lambda h, w: cross_entropy(h @ w, t, weight=k, **options)):
        a, b = grads(f, h, w), grads(compiled(f), h, w)
        assert torch.allclose(a[0], b[0]) and all(map(torch.allclose, a[1], b[1]))


def test_on_a_gpu_the_walk_is_the_same(monkeypatch):
    "Its code, run on a CPU without kernels: chunks of 128 rows, every row taken along, an id that does not exist gives NaN"
    h, w, t, k = leaf(300, 8, dtype=F64), torch.randn(301, 8).double().t().requires_grad_(), torch.randint(301, (300,)), torch.rand(300).double()
    t[torch.rand(300) < .3] = -100; k[5] = 0
    for weight in (None, k):
        for options in ((0., 0.), (.1, 4.)):
            scored = (t != -100) if weight is None else (t != -100) & (k != 0)
            want = loss_and_grads(h.detach(), w.detach(), t, -100, True, True, weight, *options)
            x = h.detach().where(scored[:, None], math.nan)                       # what is not scored may hold anything
            for size in (1, 10**9):
                monkeypatch.setitem(ce.CHUNK_BYTES, 'cpu', size); monkeypatch.setattr(ce, 'CHUNK_ROWS', size)
                for a, b in zip(ce._on_gpu(x, w.detach(), t, -100, True, True, weight, *options, scored), want): close(a, b, 1e-12)
                assert [x.numel() for x in ce._on_gpu(h.detach(), w.detach(), t, -100, False, False, weight, *options, scored)] == [1, 1, 0, 0]
    bad = t.clone(); bad[7] = 301; bad[8] = -5
    total, _, dh, dw = ce._on_gpu(h.detach(), w.detach(), bad, -100, True, True, None, 0., 0., bad != -100)
    assert total.isnan() and dh.isnan().any(1).nonzero().flatten().tolist() == [7, 8] and dw.isnan().all()


@pytest.fixture(scope='module')
def ns():
    "The kernels' arithmetic in the plain loops that the same file has for a CPU (float32)"
    from xtrain.kernels import csrc_path, describe, load_source
    return describe('cross_entropy', load_source(csrc_path()/'cross_entropy.cu', gpu=False))


@pytest.mark.parametrize('far', [0., 1e3, -1e4, 1e6, 6e7, 7e7, 1e9, -1e30, 3e38])
def test_kernel_arithmetic(ns, far):
    "Loss and gradient against float64, error no larger than torch's; a common offset of any size"
    for N, V in [(5, 1), (40, 77), (9, 5003)]:
        z, t, g = 3*torch.randn(N, V)+far, torch.randint(V, (N,)), torch.randn(N)
        if V > 1: z[0] = -math.inf; z[0, t[0]] = far
        z64 = z.double().requires_grad_(); want = F.cross_entropy(z64, t, reduction='none'); dz64, = torch.autograd.grad(want, z64, g.double())
        z32 = z.clone().requires_grad_(); theirs = F.cross_entropy(z32, t, reduction='none'); dz32, = torch.autograd.grad(theirs, z32, g)
        l, stats = ns.cross_entropy(z, t, -100, 0., 0.)
        y = z.clone(); both = ns.loss_and_grad_(y, t, g, -100, 0., 0.)
        for a, b, r in ((l, theirs, want), (ns.cross_entropy_backward(g, z, t, stats, -100, 0., 0.), dz32, dz64), (both, theirs*g, want*g), (y, dz32, dz64)):
            assert rel_error(a, r) <= 1.05*rel_error(b, r) + 2e-7 if r.any() else not a.any()


def test_kernel_arithmetic_at_the_edges(ns):
    z, t = torch.randn(6, 9), torch.tensor([3, -100, 9, -1, 2**40, 0])
    z[1] = math.nan; z[5, 4] = math.inf
    for options in ((0., 0.), (.1, 3.)):
        l, stats = ns.cross_entropy(z, t, -100, *options)
        dz = ns.cross_entropy_backward(torch.ones(()).expand(6), z, t, stats, -100, *options)
        assert l[1] == 0 and not dz[1].any() and l[2:5].isnan().all() and dz[2:5].isnan().all() and l[0].isfinite() and dz[0].isfinite().all()
        if not options[1]: assert not l[5].isfinite() and not dz[5].isfinite().all()      # inf is not hidden
    assert [x.shape for x in ns.cross_entropy(z[:0], t[:0], -100, 0., 0.)] == [(0,), (0, 2)]


@pytest.mark.parametrize('size', [1, 10**9])
def test_the_two_ways_of_a_gpu_on_a_cpu(ns, monkeypatch, size):
    "Few tokens: logits are made twice, all rows of some columns at a time; both ways give what the CPU's own walk gives"
    monkeypatch.setattr(ce, 'cuda_ops', lambda *a: ns); monkeypatch.setattr(ce, 'kernels', lambda *a: ns); monkeypatch.setattr(ce, 'CHUNK_ROWS', size)
    for d in ('cpu', 'cuda'): monkeypatch.setitem(ce.CHUNK_BYTES, d, size)
    h, w, t, k = leaf(300, 8), torch.randn(301, 8).t().requires_grad_(), torch.randint(301, (300,)), torch.rand(300)
    t[torch.rand(300) < .3] = -100; k[5] = 0
    for kw in (dict(), dict(weight=k, z_loss=.1, softcap=4., reduction='sum'), dict(weight=-k)):
        f = lambda h, w: linear_cross_entropy(h, w, t, **kw)
        l, want = grads(f, h, w)
        with monkeypatch.context() as m:
            m.setattr(ce, '_twice', lambda *a: True)
            l2, got = grads(f, h.detach().index_fill(0, (t == -100).nonzero()[:, 0], math.nan).requires_grad_(), w)
        for a, b in zip((l2, *got), (l, *want)): close(a, b, 1e-6)
        assert got[1].stride() == w.stride() and not got[0][t == -100].any()
        scored = (t != -100) & (k != 0) if 'weight' in kw else t != -100
        total, n, dh, dw = ce._on_gpu(h.detach(), w.detach(), t, -100, True, True, kw.get('weight'), kw.get('z_loss', 0.), kw.get('softcap', 0.), scored)
        if kw.get('reduction') == 'sum': n = 1
        for a, b in zip((total/n, dh/n, dw/n), (l, *want)): close(a, b, 1e-6)
    bad = t.clone(); bad[7] = 301
    monkeypatch.setattr(ce, 'check_ids', lambda *a: None); monkeypatch.setattr(ce, '_twice', lambda *a: True)
    l, (dh, dw) = grads(lambda h, w: linear_cross_entropy(h, w, bad), h, w)
    assert l.isnan() and dh.isnan().any(1).nonzero().flatten().tolist() == [7] and dw.isnan().all()
    l, (dh, dw) = grads(lambda h, w: linear_cross_entropy(h[:0], w, t[:0]), h, w)
    assert l == 0 and not dh.any() and not dw.any()


def test_opcheck_of_the_kernels(ns, monkeypatch):
    "Schema, fake, gradient; and the way of few tokens compiled without a break"
    monkeypatch.setattr(ce, 'cuda_ops', lambda *a: ns); monkeypatch.setattr(ce, 'kernels', lambda *a: ns)
    z, t, h, w = torch.randn(5, 37, requires_grad=True), torch.tensor([3, -100, 36, 0, 7]), torch.randn(5, 16), torch.randn(37, 16).t()
    stats = ns.cross_entropy(z.detach(), t, -100, .1, 5.)[1]
    for op, args in ((ns.cross_entropy, (z, t)), (ns.cross_entropy_backward, (torch.randn(5), z.detach(), t, stats)), (ns.loss_and_grad_, (z.detach().clone(), t, torch.rand(5))),
                     (ns.grad_columns_, (z.detach().clone()[:, 3:], torch.randn(5), t, stats, 3)), (ce.head_losses, (h, w, t))): torch.library.opcheck(op, (*args, -100, .1, 5.))
    torch.library.opcheck(ce.head_grads, (torch.randn(5), h, w, t, stats, -100, True, True, .1, 5.))
    monkeypatch.setattr(ce, '_twice', lambda *a: True)
    f = lambda h, w: linear_cross_entropy(h, w, t, z_loss=.01, softcap=20.)
    h, w = h.requires_grad_(), w.requires_grad_()
    for a, b in zip(*([l, *g] for l, g in (grads(compiled(f), h, w), grads(f, h, w)))): close(a, b, 1e-6)


def test_opcheck_and_compile():
    h, w, t = leaf(20, 4), torch.randn(31, 4).t().requires_grad_(), torch.randint(31, (20,)); t[3] = -100
    for dtype in (F32, BF16): torch.library.opcheck(loss_and_grads, (h.detach().to(dtype), w.detach().to(dtype), t, -100, True, True))
    for f in (lambda h, w: linear_cross_entropy(h, w, t), lambda h, w: cross_entropy(h @ w, t)):
        a, b = grads(f, h, w), grads(compiled(f), h, w)
        assert torch.equal(a[0], b[0]) and all(map(torch.equal, a[1], b[1]))


def test_faster_than_the_plain_loss_with_a_large_vocabulary():
    h, w, t = leaf(256, 32), torch.randn(50257, 32).mul_(.1).t().requires_grad_(), torch.randint(50257, (256,))
    best = {}
    for _ in range(4):
        for f in (plain, linear_cross_entropy):
            gc.collect(); start = time.process_time()
            grads(lambda h, w: f(h, w, t), h, w)
            best[f] = min(best.get(f, 99), time.process_time()-start)
    assert best[plain]/best[linear_cross_entropy] > 1.5, best


def test_large_vocabulary():
    V = 151936
    z, t = torch.randn(3, V), torch.tensor([0, V-1, 77])
    assert torch.allclose(cross_entropy(z, t), F.cross_entropy(z, t))


# --- RoPE --------------------------------------------------------------------------------------------------------------------

def test_table_values():
    pos = torch.tensor([255, 257, 4095, 15962, 32767])
    cos, _ = rope_tables(pos, 128, 1e6)
    assert torch.allclose(cos[:, 0], torch.tensor([-0.8623036, 0.8193055, -0.0659760, -0.9080159, 0.9822634]), atol=1e-6)
    assert (cos[2].double()-rope_tables(pos, 128, 1e6, F64)[0][2]).abs().max() <= 2e-4
    assert torch.equal(rope_tables(pos, 128, 1e6, BF16)[0], cos.bfloat16())


@pytest.fixture(scope='module')
def hf():
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        from transformers import Qwen3Config
        from transformers.models.qwen3 import modeling_qwen3
    return types.SimpleNamespace(Config=Qwen3Config, m=modeling_qwen3)


@pytest.mark.parametrize('D,theta', [(16, 1e4), (64, 1e4), (128, 1e6), (6, 500.)])
def test_tables_and_rotation_have_transformers_bits(hf, D, theta):
    emb = hf.m.Qwen3RotaryEmbedding(hf.Config(head_dim=D, rope_parameters=dict(rope_type='default', rope_theta=theta)))
    for dtype in (F32, BF16):
        ids = torch.tensor([[0, 1, 2, 300, 4097], [5, 6, 7, 8, 40000]])
        cos, sin = rope_tables(ids, D, theta, dtype)
        for a, b in zip((cos, sin), emb(torch.empty(0, dtype=dtype), ids)): assert torch.equal(a, b) and a.dtype == dtype
        q, k = torch.randn(2, 5, 4, D).to(dtype).transpose(1, 2), torch.randn(2, 5, 2, D).to(dtype).transpose(1, 2)
        for x, want in zip((q, k), hf.m.apply_rotary_pos_emb(q, k, cos, sin)):
            assert torch.equal(rope(x, cos[:, None], sin[:, None]), want) and torch.equal(rope_ref(x, cos[:, None], sin[:, None]), want)


@quick
@given(B=st.integers(0, 3), H=st.integers(1, 3), T=st.sampled_from([0, 1, 5]), D=st.sampled_from([2, 6, 16]), dtype=st.sampled_from([F64, F32, BF16]), order=st.permutations(range(4)), per_row=st.booleans(), expanded=st.booleans(), seed=st.integers(0, 9))
def test_rope_bits_any_strides(B, H, T, D, dtype, order, per_row, expanded, seed):
    torch.manual_seed(seed)
    back = [order.index(i) for i in range(4)]
    x = torch.randn([(B, H, T, D)[i] for i in order]).to(dtype).permute(back).requires_grad_()
    cos, sin = rope_tables(torch.randint(9, (B, 1, T) if per_row else (T,)), D, dtype=dtype)
    a, b = rope(x, cos, sin), rope_ref(x, cos, sin)
    assert torch.equal(a, b) and a.is_contiguous()
    g = torch.randn((), dtype=dtype).expand(a.shape) if expanded else torch.randn_like(a)
    (ga,), (gb,) = torch.autograd.grad(a, x, g), torch.autograd.grad(b, x, g)
    assert torch.equal(ga, gb)
    with torch.no_grad(): assert torch.equal(rope(x, cos, sin), b)


def test_rope_gradient_is_the_negative_angle():
    (cos, sin), g = rope_tables(torch.arange(7), 8), torch.randn(2, 3, 7, 8)
    assert torch.equal(rope_grad(cos, sin, g), rope_ref(g, cos, -sin))
    c, s = rope_tables(torch.arange(3), 6, dtype=F64); x = torch.randn(1, 2, 3, 6).double()
    gradcheck(lambda x: rope(x, c, s), lambda x, g: rope_grad(c, s, g), x)
    assert torch.autograd.gradgradcheck(lambda x: rope(x, c, s), x.requires_grad_())
    with pytest.raises(AssertionError, match='relative error'): gradcheck(lambda x: rope(x, c, s), lambda x, g: rope_ref(g, c, s), x)


def test_rope_score_depends_on_the_distance_only():
    q, k = torch.randn(2, 1, 16).double()
    s = [rope(q, *rope_tables(torch.tensor([m]), 16, dtype=F64)) @ rope(k, *rope_tables(torch.tensor([n]), 16, dtype=F64)).T for m, n in [(5, 2), (105, 102), (3, 0)]]
    assert torch.allclose(s[0], s[1], atol=1e-11) and torch.allclose(s[0], s[2], atol=1e-12)


def test_rope_bad_arguments_are_named():
    x, (cos, sin) = torch.randn(1, 2, 5, 8), rope_tables(torch.arange(5), 8)
    for bad, word in [(lambda: rope(x[..., :7], cos, sin), 'x must have an even'), (lambda: rope(x, cos[:4], sin), 'cos must have shape'), (lambda: rope(x, cos, sin.double()), 'sin must be'),
                      (lambda: rope(x.bfloat16(), cos, sin), 'cos must be'), (lambda: rope(x, cos, sin.expand(3, 1, 5, 8)), 'sin of shape'), (lambda: rope(x[0, 0, 0], cos, sin), 'x must have shape'),
                      (lambda: rope_tables(torch.arange(5), 7), 'head_dim must be even'), (lambda: rope_tables(torch.arange(5.), 8), 'positions must hold integers')]:
        with pytest.raises(ValueError, match=word): bad()


def test_rope_compiles_and_repeats():
    x, (cos, sin) = leaf(2, 3, 5, 8), rope_tables(torch.arange(5), 8)
    a, b = grads(lambda x: rope(x, cos, sin), x, g=torch.ones(2, 3, 5, 8)), grads(compiled(lambda x: rope(x, cos, sin)), x, g=torch.ones(2, 3, 5, 8))
    assert torch.equal(a[0], b[0]) and torch.equal(a[1][0], b[1][0])


# --- attention ---------------------------------------------------------------------------------------------------------------

def independent(q, k, v, pad=None):
    "Row by row in plain indexing: nothing shared with the package"
    B, H, T, D = q.shape; K, S = k.shape[1:3]
    out = []
    for b, h, i in itertools.product(range(B), range(H), range(T)):
        lo, hi = 0 if pad is None else int(pad[b]), S-T+i+1
        keys = range(lo, hi)
        if len(keys) == 0: out.append(torch.zeros(D, dtype=q.dtype)); continue
        kk, vv = (torch.stack([t[b, h//(H//K), j] for j in keys]) for t in (k, v))
        out.append((kk @ q[b, h, i]/math.sqrt(D)).softmax(0) @ vv)
    return torch.stack(out).view(B, H, T, D)


@quick
@given(B=st.integers(1, 3), K=st.integers(1, 2), group=st.sampled_from([1, 2, 3]), T=st.integers(1, 5), S=st.integers(1, 6), D=st.sampled_from([2, 5]), padded=st.booleans(), path=st.sampled_from(sorted(PATHS)), seed=st.integers(0, 99))
def test_attention_against_loops(B, K, group, T, S, D, padded, path, seed):
    torch.manual_seed(seed)
    q, k, v = leaf(B, K*group, T, D, dtype=F64), leaf(B, K, S, D, dtype=F64), leaf(B, K, S, D, dtype=F64)
    pad = torch.randint(0, S+1, (B,)) if padded else None
    g = torch.randn(B, K*group, T, D).double()
    a, ga = grads(lambda *x: attention(*x, pad, path), q, k, v, g=g)
    b = independent(q, k, v, pad)
    assert torch.allclose(a, b, atol=1e-12)
    gb = torch.autograd.grad(b, (q, k, v), g, allow_unused=True) if b.requires_grad else (None,)*3
    for x, y in zip(ga, gb): assert x.isfinite().all() and torch.allclose(x, torch.zeros_like(x) if y is None else y, atol=1e-11)


def test_composed_has_transformers_bits(hf):
    random.seed(0)
    def theirs(q, k, v, mask):
        hidden = torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, torch.finfo(q.dtype).min)
        return hf.m.eager_attention_forward(types.SimpleNamespace(num_key_value_groups=q.shape[1]//k.shape[1], training=False), q, k, v, hidden, q.shape[-1]**-.5)[0].transpose(1, 2)
    for _ in range(120):
        dtype, B, K, group, D = random.choice([F32, BF16]), random.choice([1, 2, 3]), random.choice([1, 2, 3]), random.choice([1, 1, 2, 4]), random.choice([8, 16, 32, 63, 64, 128])
        T = random.choice([1, 2, 7, 37]); S = T + random.choice([0, 0, 1, 30])
        q, k, v = (torch.randn(B, t, h, D).to(dtype).transpose(1, 2) for t, h in ((T, K*group), (S, K), (S, K)))
        if random.random() < .5: k, v = k.contiguous(), v.contiguous()   # as a cache hands them over
        assert torch.equal(attention(q, k, v), theirs(q, k, v, causal_mask(T, S)))
        pad = torch.randint(0, S, (B,))
        ours, want, sees = attention(q, k, v, pad), theirs(q, k, v, causal_mask(T, S, pad)), causal_mask(T, S, pad).any(-1, keepdim=True)
        assert torch.equal(ours, want.masked_fill(~sees, 0)) and torch.equal(ours, attention_ref(q, k, v, causal_mask(T, S, pad)))


@pytest.mark.parametrize('dtype', [F32, BF16])
def test_attention_gradients_no_worse_than_torchs(dtype):
    q, k, v, g = leaf(2, 6, 40, 16, dtype=dtype), leaf(2, 2, 40, 16, dtype=dtype), leaf(2, 2, 40, 16, dtype=dtype), torch.randn(2, 6, 40, 16).to(dtype)
    ref = lambda *x: attention_ref(*x, causal_mask(40, 40))
    exact = grads(ref, *(x.detach().double().requires_grad_() for x in (q, k, v)), g=g.double())[1]
    torchs = grads(ref, q, k, v, g=g)[1]
    for x, t, e in zip(grads(lambda *x: attention(*x), q, k, v, g=g)[1], torchs, exact): assert x.dtype == dtype and rel_error(x, e) <= 2*rel_error(t, e)


@pytest.mark.parametrize('path', sorted(PATHS))
class TestPaths:
    def test_q_len_is_not_kv_len(self, path):
        for (T, S), want in {(2, 5): [1.5, 2.], (1, 7): [3.], (3, 3): [0., .5, 1.], (5, 2): [0., 0., 0., 0., .5]}.items():
            q, k, v = torch.zeros(1, 1, T, 4, requires_grad=True), torch.zeros(1, 1, S, 4, requires_grad=True), torch.arange(float(S)).view(1, 1, S, 1).expand(1, 1, S, 4).clone().requires_grad_()
            o = attention(q, k, v, path=path); o.sum().backward()
            assert torch.allclose(o[0, 0, :, 0], torch.tensor(want), atol=1e-6) and all(x.grad.isfinite().all() for x in (q, k, v))

    @pytest.mark.parametrize('H,K', [(6, 2), (4, 1), (16, 2), (3, 3)])
    def test_head_map(self, path, H, K):
        q, k = torch.zeros(1, H, 5, 4), torch.zeros(1, K, 5, 4)
        v = torch.arange(1., K+1).view(1, K, 1, 1).expand(1, K, 5, 4).clone().requires_grad_()
        o = attention(q, k, v, path=path); o.sum().backward()
        assert torch.allclose(o[0, :, 2, 1], torch.arange(1., K+1).repeat_interleave(H//K))
        assert torch.allclose(v.grad.sum(2), torch.full((1, K, 4), 5.*H/K))
        if H == 6: assert torch.allclose(v.grad[0, 0, :, 0], torch.tensor([6.85, 3.85, 2.35, 1.35, .60]), atol=1e-5)

    def test_random_against_repeat_interleave(self, path):
        for H, K in [(4, 1), (16, 2), (4, 4), (6, 2)]:
            q, k, v = leaf(2, H, 9, 8), leaf(2, K, 9, 8), leaf(2, K, 9, 8)
            a, ga = grads(lambda q, k, v: attention(q, k, v, path=path).square().sum(), q, k, v)
            b, gb = grads(lambda q, k, v: F.scaled_dot_product_attention(q, k.repeat_interleave(H//K, 1), v.repeat_interleave(H//K, 1), is_causal=True).square().sum(), q, k, v)
            close(a, b, 1e-5)
            for x, y in zip(ga, gb): close(x, y, 1e-5)

    def test_one_token_returns_the_value(self, path):
        q, k, v = torch.randn(3, 2, 4, 1, 8)
        assert torch.equal(attention(q, k, v, path=path), v)

    def test_empty(self, path):
        for B, T, S in [(0, 3, 3), (2, 0, 0), (2, 0, 4), (2, 3, 0), (2, 1, 0)]:
            o = attention(torch.randn(B, 4, T, 8), torch.randn(B, 2, S, 8), torch.randn(B, 2, S, 8), path=path)
            assert o.shape == (B, 4, T, 8) and not o.any()

    def test_blind_rows(self, path):
        for dtype in (F32, BF16):
            q, k, v = (leaf(2, 4, 6, 8, dtype=dtype) for _ in range(3))
            o = attention(q, k, v, torch.tensor([6, 2]), path); o.sum().backward()
            assert not o[0].any() and not o[1, :, :2].any() and o[1, :, 2:].all()
            assert all(x.grad.isfinite().all() and not x.grad[0].any() and not x.grad[1, :, :2].any() for x in (q, k, v))

    def test_padding_is_like_being_alone(self, path):
        q, k, v = torch.randn(3, 2, 4, 7, 8)
        o = attention(q, k, v, torch.tensor([0, 3]), path)
        assert torch.allclose(o[1:, :, 3:], attention(q[1:, :, 3:], k[1:, :, 3:], v[1:, :, 3:], path=path), atol=1e-6)

    def test_strides_and_flat_gradients(self, path):
        q, k, v = (torch.randn(2, 9, 4, 8).transpose(1, 2).requires_grad_() for _ in range(3))
        c = [x.detach().contiguous().requires_grad_() for x in (q, k, v)]
        a, b = grads(lambda *x: attention(*x, path=path).sum(), q, k, v), grads(lambda *x: attention(*x, path=path).sum(), *c)
        for x, y in zip(a[1], b[1]): assert torch.allclose(x, y, atol=1e-6)

    def test_queries_that_overlap(self, path):
        "A sliding window over one row of numbers: of such a tensor torch makes a result in which the channels of a token are not side by side"
        k, v, g = *torch.randn(2, 2, 2, 9, 16), torch.randn(2, 4, 9, 16)
        for q in (torch.randn(2, 4, 24).unfold(2, 16, 1), torch.randn(2, 9, 19).unfold(2, 16, 1).transpose(1, 2), torch.randn(31).as_strided((2, 4, 9, 16), (1, 1, 1, 1))):
            a, b = (grads(lambda *x: attention(*x, path=path), *(x.as_strided(x.shape, x.stride()).requires_grad_() for x in (q, k, v)), g=g) for q in (q, q.clone(memory_format=torch.contiguous_format)))
            close(a[0], b[0], 1e-5)
            for x, y in zip(a[1], b[1]): close(x, y, 1e-5)

    def test_compiled_for_lengths_that_change(self, path):
        f = compiled(lambda *x: attention(*x, path=path), dynamic=True)
        for H, T, S in [(4, 6, 6), (4, 9, 9), (4, 1, 9), (4, 3, 9), (2, 5, 5)]:
            q, k, v = leaf(2, H, T, 8), leaf(2, 2, S, 8), leaf(2, 2, S, 8)
            a, b = grads(f, q, k, v, g=torch.ones(2, H, T, 8)), grads(lambda *x: attention(*x, path=path), q, k, v, g=torch.ones(2, H, T, 8))
            close(a[0], b[0], 1e-5)
            for x, y in zip(a[1], b[1]): close(x, y, 1e-5)

    def test_scale(self, path):
        q, k, v = torch.randn(3, 1, 2, 5, 8)
        assert torch.allclose(attention(q, k, v, path=path, scale=.5), attention_ref(q, k, v, causal_mask(5, 5), .5), atol=1e-6)
        for c in (0., -1.): assert torch.allclose(attention(q, k, v, path=path, scale=c), attention_ref(c*q, k, v, causal_mask(5, 5), 1.), atol=1e-6)

    def test_deterministic_and_compiled(self, path):
        q, k, v, pad = leaf(2, 4, 8, 8), leaf(2, 2, 8, 8), leaf(2, 2, 8, 8), torch.tensor([0, 3])
        for p in (None, pad):
            f = lambda *x: attention(*x, p, path).square().sum()
            first = grads(f, q, k, v)
            for _ in range(100): assert all(map(torch.equal, first[1], grads(f, q, k, v)[1]))
            for x, y in zip(first[1], grads(compiled(f), q, k, v)[1]): assert torch.allclose(x, y, atol=1e-6)


def test_attention_gradcheck_and_a_forgotten_delta():
    q, k, v = torch.randn(1, 4, 3, 2).double(), torch.randn(1, 2, 4, 2).double(), torch.randn(1, 2, 4, 2).double()
    mask, f = causal_mask(3, 4), lambda q, k, v: attention(q, k, v)
    p = lambda q, k: (q @ k.repeat_interleave(2, 1).mT/math.sqrt(2)).masked_fill(~mask, -math.inf).softmax(-1)
    gradcheck(f, lambda q, k, v, g: attention_grad(q, k, v, p(q, k), f(q, k, v), g), q, k, v)
    with pytest.raises(AssertionError, match='relative error'): gradcheck(f, lambda q, k, v, g: attention_grad(q, k, v, p(q, k), torch.zeros_like(q), g), q, k, v)


def test_attention_bad_arguments_are_named():
    q, k, v = torch.randn(2, 6, 9, 16), torch.randn(2, 2, 9, 16), torch.randn(2, 2, 9, 16)
    for bad, word in [(lambda: attention(q[0], k, v), 'q must have shape'), (lambda: attention(q, k[..., :8], v), 'k must have shape'), (lambda: attention(q, k, v[:, :, :5]), 'v must have shape'),
                      (lambda: attention(q, *torch.randn(2, 2, 4, 9, 16)), 'k has 4 heads, q has 6'), (lambda: attention(q, k.double(), v), 'k must be torch.float32'), (lambda: attention(q, k, v, torch.zeros(3).long()), 'pad must have shape'),
                      (lambda: attention(q, k, v, torch.zeros(2)), 'pad must hold integers'), (lambda: attention(q, k, v, path='fast'), 'composed')]:
        with pytest.raises(ValueError, match=word): bad()


def test_a_new_path_plugs_in(monkeypatch):
    monkeypatch.setitem(PATHS, 'mine', lambda q, k, v, pad, scale: q*0+7)
    assert attention_path('mine') == 'mine' and attention_path('auto') in PATHS
    assert (attention(*torch.randn(3, 1, 1, 2, 4), path='mine') == 7).all()


def test_sdpa_is_never_shown_a_row_that_sees_nothing(monkeypatch):
    shown, real = [], F.scaled_dot_product_attention   # some of its kernels answer NaN
    monkeypatch.setattr(F, 'scaled_dot_product_attention', lambda *a, **k: (shown.append(k['attn_mask']), real(*a, **k))[1])
    for T, pad in ((6, torch.tensor([6, 2])), (8, None)): attention(torch.randn(2, 4, T, 8), *torch.randn(2, 2, 4, 6, 8), pad, 'sdpa')
    assert len(shown) == 2 and all(m.any(-1).all() for m in shown)
