"The fused ops add_rms_norm and qk_norm_rope, and what torch is told of the kernels of rms_norm and rope: checked on a CPU with a stand-in for the kernels"
import random

import pytest, torch
from hypothesis import given, settings, strategies as st

import xtrain.model
from xtrain import kernels
from xtrain.config import ModelConfig
from xtrain.gradcheck import gradcheck, rel_error
from xtrain.ops.rms_norm import add_rms_norm, add_rms_norm_grad, add_rms_norm_ref, rms_norm, rms_norm_grad, rms_norm_ref
from xtrain.ops.rope import qk_norm_rope, qk_norm_rope_grad, qk_norm_rope_ref, rope, rope_grad, rope_ref, rope_tables

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
props = settings(max_examples=30, deadline=None, derandomize=True, database=None)


def make(shape, dtype, layout):
    new = lambda *s: torch.randn(*s, dtype=F64).to(dtype)
    if layout == 'turned': return new(*reversed(shape)).permute(*reversed(range(len(shape))))
    if layout == 'every other': return new(*(2*s for s in shape))[tuple(slice(None, 2*s, 2) for s in shape)]
    if layout == 'expanded': return new(1, *shape[1:]).expand(shape)
    return new(*shape)

def leaf(t): return t.detach().as_strided(t.shape, t.stride(), t.storage_offset()).requires_grad_()
def grads(f, inputs, *g):
    leaves = [leaf(t) for t in inputs]
    out = f(*leaves)
    return torch.autograd.grad(out, leaves, g if isinstance(out, tuple) else g[0])

layouts, dtypes = st.sampled_from(['dense', 'turned', 'every other', 'expanded']), st.sampled_from([F64, F32, BF16, F16])


@props
@given(st.integers(0, 5), st.integers(1, 9), dtypes, layouts, layouts, layouts, st.sampled_from([1e-6, 1e-2]), st.integers(0, 99))
def test_add_rms_norm_has_the_bits_of_two_ops(N, D, dtype, lx, lr, lg, eps, seed):
    torch.manual_seed(seed)
    x, r, g, gh, w = make((N, D), dtype, lx), make((N, D), dtype, lr), make((N, D), dtype, lg), make((N, D), dtype, lx), make((D,), F32, 'every other')
    two = lambda x, r, w: (rms_norm((h := x + r), w, eps), h)
    one = lambda x, r, w: add_rms_norm(x, r, w, eps)
    for a, b in zip((*one(x, r, w), *grads(one, (x, r, w), g, gh)), (*two(x, r, w), *grads(two, (x, r, w), g, gh))): assert torch.equal(a, b)
    for a, b in zip(one(x, r, w), add_rms_norm_ref(x, r, w, eps)): assert torch.equal(a, b)
    if N:
        dh, dw = add_rms_norm_grad(x + r, w, g, gh, eps)
        want = grads(lambda h, w: (rms_norm_ref(h, w, eps), h*1), ((x + r).double(), w.to(dtype).double()), g.double(), gh.double())
        tol = {F64: 1e-12, F32: 1e-5, BF16: 1e-2, F16: 2e-3}[dtype]
        scale = (g.double()*w.double()).norm()*(x + r).double().square().mean(-1).add(eps).rsqrt().max() + gh.double().norm()
        assert (dh.double() - want[0]).norm() <= tol*scale and dh.dtype == dtype and dw.dtype == F32


@props
@given(st.integers(0, 3), st.integers(0, 5), st.integers(1, 4), st.sampled_from([2, 6, 16, 32]), dtypes, layouts, layouts, st.booleans(), st.integers(0, 99))
def test_qk_norm_rope_has_the_bits_of_two_ops(B, T, H, D, dtype, lx, lg, by_row, seed):
    torch.manual_seed(seed)
    if not B: lx = lg = 'dense'
    x, g, w = make((B, T, H, D), dtype, lx), make((B, H, T, D), dtype, lg), make((D,), F32, 'dense')
    t = rope_tables(torch.randint(900, (B, 1, T) if by_row else (T,)), D, dtype=dtype)
    two = lambda x, w: rope(rms_norm(x, w).transpose(1, 2), *t)
    one = lambda x, w: qk_norm_rope(x, w, *t)
    for a, b in zip((one(x, w), *grads(one, (x, w), g)), (two(x, w), *grads(two, (x, w), g))): assert torch.equal(a, b)
    assert torch.equal(one(x, w), qk_norm_rope_ref(x, w, *t))
    with torch.no_grad(): assert torch.equal(one(x, w), two(x, w))


def test_gradients_by_hand():
    torch.manual_seed(0)
    x, s, w = torch.randn(3, 7, dtype=F64), torch.randn(3, 7, dtype=F64), torch.randn(7, dtype=F64)
    def by_hand(x, s, w, g): dh, dw = add_rms_norm_grad(x + s, w, *g.chunk(2)); return dh, dh, dw
    assert gradcheck(lambda *a: torch.cat(add_rms_norm_ref(*a)), by_hand, x, s, w) < 1e-6
    q, w, t = torch.randn(2, 3, 2, 8, dtype=F64), torch.randn(8, dtype=F64), rope_tables(torch.arange(3), 8, dtype=F64)
    assert gradcheck(lambda x, w: qk_norm_rope_ref(x, w, *t), lambda x, w, g: qk_norm_rope_grad(x, w, *t, g), q, w) < 1e-6


def test_faults_of_the_fused_ops():
    "Overflow of squares in half, epsilon inside the root, zeros, the order of roundings, positions that bfloat16 does not have"
    one = lambda n, dtype=F32: torch.ones(n, dtype=dtype)
    half = torch.full((1, 1024), 150., dtype=F16)
    assert add_rms_norm(half, half, one(1024, F16))[0].eq(1).all()
    small = torch.full((1, 64), 5e-4)
    assert rel_error(add_rms_norm(small, small, one(64))[0], torch.full((1, 64), .7071068)) < 1e-6
    x, w = (torch.arange(1, 9)/4).bfloat16(), (1.0078125 + torch.arange(8)/128).bfloat16()
    want = torch.tensor([.2001953125, .40234375, .609375, .81640625, 1.0234375, 1.2421875, 1.4609375, 1.6875])
    assert torch.equal(add_rms_norm(x, torch.zeros_like(x), w)[0].float(), want)
    assert torch.equal(qk_norm_rope(x.view(1, 1, 1, 8), w, *rope_tables(torch.tensor([0]), 8, dtype=BF16)).flatten().float(), want)
    assert qk_norm_rope(torch.full((1, 1, 1, 64), 300., dtype=F16), one(64), *rope_tables(torch.tensor([0]), 64, dtype=F16)).eq(1).all()
    pos = torch.tensor([257, 4095, 15962, 32767])
    e = torch.eye(128)[:1].expand(1, 1, 4, 128).transpose(1, 2)*(1/128**.5)
    y = qk_norm_rope(e, one(128), *rope_tables(pos, 128, 1e6), eps=0.)[0, 0, :, 0]
    assert torch.allclose(y/128**.5, torch.tensor([.8193055, -.0659760, -.9080159, .9822634]), atol=2e-6)


@pytest.mark.parametrize('call, says', [
    (lambda o: add_rms_norm(o, o[:1], torch.ones(4)), 'res must have shape (2, 4), got (1, 4)'), (lambda o: add_rms_norm(o, o.double(), torch.ones(4)), 'res must be torch.float32, got torch.float64'),
    (lambda o: add_rms_norm(o, o.to('meta'), torch.ones(4)), 'res must be on cpu, got meta'), (lambda o: add_rms_norm(o, o, torch.ones(3)), 'w must have shape (4,), got (3,)'),
    (lambda o: add_rms_norm(o.long(), o, torch.ones(4)), 'x must be floating-point'), (lambda o: qk_norm_rope(o, torch.ones(4), o, o), 'x must have shape'),
    (lambda o: qk_norm_rope(o.view(1, 2, 1, 4), torch.ones(2), o, o), 'w must have shape (4,), got (2,)'), (lambda o: qk_norm_rope(o.view(1, 1, 2, 4), torch.ones(4), o, o), 'cos must have shape (..., 1, 4), got (2, 4)'),
    (lambda o: qk_norm_rope(o.view(1, 2, 1, 4), torch.ones(4), o, o.half()), 'sin must be torch.float32'), (lambda o: qk_norm_rope(torch.ones(1, 2, 1, 3), torch.ones(3), o, o), 'x must have an even number')])
def test_errors_name_the_argument(call, says):
    with pytest.raises(ValueError) as e: call(torch.ones(2, 4))
    assert says in str(e.value) and '\n' not in str(e.value)


def test_the_model_calls_the_fused_ops(monkeypatch):
    calls = []
    for name in ('rms_norm', 'add_rms_norm', 'qk_norm_rope'):
        f = getattr(xtrain.model, name)
        monkeypatch.setattr(xtrain.model, name, lambda *a, f=f, name=name: (calls.append(name), f(*a))[1])
    xtrain.model.TinyTransformer(ModelConfig(50, 16, 3, 4, 2, 8, 16), seed=0)(torch.zeros(1, 4, dtype=torch.long))
    assert calls == ['rms_norm', 'qk_norm_rope', 'qk_norm_rope', 'add_rms_norm']*3 + ['rms_norm']


# --- what torch is told of the kernels -------------------------------------------------------------------------------------------

SCHEMAS = '''rms_norm(Tensor x, Tensor w, float eps) -> Tensor
rms_norm_backward(Tensor g, Tensor x, Tensor w, float eps) -> (Tensor, Tensor)
add_rms_norm(Tensor x, Tensor res, Tensor w, float eps) -> (Tensor, Tensor)
add_rms_norm_backward(Tensor gy, Tensor gh, Tensor h, Tensor w, float eps) -> (Tensor, Tensor)
rope(Tensor x, Tensor cos, Tensor sin) -> Tensor
rope_backward(Tensor g, Tensor cos, Tensor sin) -> Tensor
qk_norm_rope(Tensor x, Tensor w, Tensor cos, Tensor sin, float eps) -> Tensor
qk_norm_rope_backward(Tensor g, Tensor x, Tensor w, Tensor cos, Tensor sin, float eps) -> (Tensor, Tensor)'''.splitlines()

@pytest.fixture(scope='module')
def stand_in():
    "Ops with the kernels' names, schemas and memory layouts, made of the definitions"
    for file in ('rms_norm', 'rope'):
        source = (kernels.csrc_path()/f'{file}.cu').read_text()
        for s in SCHEMAS:
            if s.startswith(file) or (file == 'rms_norm') == ('rms' in s.split('(')[0]): assert f'm.def("{s}")' in source, s
    lib = torch.library.Library('xtrain_stand_in', 'DEF')
    own = lambda t: t.clone(memory_format=torch.contiguous_format)
    def flat(x): return x if x.stride(-1) == 1 and all(n < 2 or s == 0 or s >= x.shape[-1] for n, s in zip(x.shape[:-1], x.stride())) else x.contiguous()
    def readable(f):                                                # as the files check it
        def g(*args): assert next(t for t in args if isinstance(t, torch.Tensor) and t.ndim == 1).dtype in (args[0].dtype, F32), 'the gain must be float32 or of the dtype of x'; return f(*args)
        return g
    def into(like, t): return torch.empty_like(flat(like)).copy_(t)
    impl = dict(
        rms_norm=lambda x, w, eps: own(rms_norm_ref(x, w, eps)), rms_norm_backward=lambda g, x, w, eps: tuple(map(own, rms_norm_grad(x, w, g, eps))),
        add_rms_norm=lambda x, r, w, eps: tuple(map(own, add_rms_norm_ref(x, r, w, eps))), add_rms_norm_backward=lambda gy, gh, h, w, eps: tuple(map(own, add_rms_norm_grad(h, w, gy, gh, eps))),
        rope=lambda x, c, s: into(x, rope_ref(x, c, s)), rope_backward=lambda g, c, s: into(g, rope_grad(c, s, g)),
        qk_norm_rope=lambda x, w, c, s, eps: own(qk_norm_rope_ref(x, w, c, s, eps).transpose(1, 2)).transpose(1, 2),
        qk_norm_rope_backward=lambda g, x, w, c, s, eps: tuple(map(own, qk_norm_rope_grad(x, w, c, s, g, eps))))
    for s in SCHEMAS: name = s.split('(')[0]; lib.define(s); lib.impl(name, readable(impl[name]) if 'norm' in name else impl[name], 'CPU')
    ns = torch.ops.xtrain_stand_in
    for file in ('rms_norm', 'rope'):
        for f in kernels._definitions[file]: f(ns)
    yield ns
    lib._destroy()

@pytest.fixture
def wired(stand_in, monkeypatch):
    "The public ops, as on a GPU: through the stand-in"
    import xtrain.ops.rms_norm, xtrain.ops.rope
    for m in (xtrain.ops.rms_norm, xtrain.ops.rope): monkeypatch.setattr(m, 'cuda_ops', lambda name, x: stand_in)
    torch._dynamo.reset()

TABLES = rope_tables(torch.arange(5), 16)
WIRED = {
    'rms_norm': (lambda x, w: rms_norm(x, w, 1e-5), lambda x, w: rms_norm_ref(x, w, 1e-5), [(6, 5, 16), (16,)]),
    'add_rms_norm': (lambda x, r, w: add_rms_norm(x, r, w, 1e-5), lambda x, r, w: add_rms_norm_ref(x, r, w, 1e-5), [(6, 5, 16), (6, 5, 16), (16,)]),
    'rope': (lambda x: rope(x, *TABLES), lambda x: rope_ref(x, *TABLES), [(2, 3, 5, 16)]),
    'rope of three axes': (lambda x: rope(x, *TABLES), lambda x: rope_ref(x, *TABLES), [(3, 5, 16)]),
    'rope of two': (lambda x: rope(x, *TABLES), lambda x: rope_ref(x, *TABLES), [(5, 16)]),
    'qk_norm_rope': (lambda x, w: qk_norm_rope(x, w, *TABLES, 1e-5), lambda x, w: qk_norm_rope_ref(x, w, *TABLES, 1e-5), [(2, 5, 3, 16), (16,)]),
}

@pytest.mark.parametrize('op', WIRED)
@pytest.mark.parametrize('layout', ['dense', 'turned', 'every other'])
def test_wiring_gives_the_definition_and_its_gradient(wired, op, layout):
    f, ref, shapes = WIRED[op]
    xs = [make(s, F32, layout) for s in shapes]
    out, want = f(*xs), ref(*xs)
    many = isinstance(out, (tuple, list))
    g = [torch.randn_like(t) for t in (want if many else [want])]
    for a, b in zip(out if many else [out], want if many else [want]): assert torch.equal(a, b)
    for a, b in zip(grads(f, xs, *g), grads(ref, xs, *g)): assert rel_error(a, b) < 1e-5
    compiled = torch.compile(f, fullgraph=True, backend='aot_eager')
    for a, b in zip(grads(compiled, xs, *g), grads(f, xs, *g)): assert rel_error(a, b) < 1e-6    # it may lay a gradient out anew

def test_wiring_passes_opcheck(stand_in):
    ns, w, t = stand_in, torch.randn(16), TABLES
    for layout in ('dense', 'turned'):
        x, q = make((6, 16), F32, layout), make((2, 3, 5, 16), F32, layout)
        for op, args in ((ns.rms_norm, (leaf(x), leaf(w), 1e-6)), (ns.add_rms_norm, (leaf(x), leaf(x), leaf(w), 1e-6)), (ns.rms_norm_backward, (x, x, w, 1e-6)), (ns.add_rms_norm_backward, (x, x, x, w, 1e-6)),
                         (ns.rope, (leaf(q), *t)), (ns.rope_backward, (leaf(q), *t)), (ns.qk_norm_rope, (leaf(q.transpose(1, 2)), leaf(w), *t, 1e-6)), (ns.qk_norm_rope_backward, (q, q.transpose(1, 2), w, *t, 1e-6))):
            torch.library.opcheck(op.default, args)

@pytest.mark.parametrize('w_dtype', [F32, F64, BF16, F16])
@pytest.mark.parametrize('dtype', [F32, BF16, F16])
def test_a_gain_of_any_dtype_on_the_way_to_the_kernels(wired, dtype, w_dtype):
    "They read it in float32 or in the rows' dtype; of another one they would read past its end"
    w, t = (1 + torch.randn(16)/8).to(w_dtype), rope_tables(torch.arange(5), 16, dtype=dtype)
    x, r, q = (torch.randn(s).to(dtype) for s in ((6, 16), (6, 16), (2, 5, 3, 16)))
    for f, ref, xs in ((rms_norm, rms_norm_ref, [x, w]), (lambda *a: add_rms_norm(*a)[0], lambda *a: add_rms_norm_ref(*a)[0], [x, r, w]), (lambda x, w: qk_norm_rope(x, w, *t), lambda x, w: qk_norm_rope_ref(x, w, *t), [q, w])):
        out = ref(*xs)
        assert torch.equal(f(*xs), out)
        g = torch.randn_like(out)
        for a, b in zip(grads(f, xs, g), grads(ref, xs, g)): assert a.dtype == b.dtype and rel_error(a, b) < (1e-5 if dtype == w_dtype == F32 else 2e-2)

@pytest.fixture(scope='module')
def layout():
    "What csrc/rope.cu allocates for a result"
    import os, shutil
    if not any(map(shutil.which, (os.environ.get('CXX') or 'c++', 'g++', 'clang++'))): pytest.skip('no C++ compiler')
    return kernels.load_source('''#include "rope.cu"
Tensor like(const Tensor& x) { return torch::stable::empty_like(dense_last(x)); }
STABLE_TORCH_LIBRARY_FRAGMENT(XTRAIN_NS, m) { m.def("like(Tensor x) -> Tensor"); }
STABLE_TORCH_LIBRARY_IMPL(XTRAIN_NS, CPU, m) { m.impl("like", TORCH_BOX(&like)); }''', name='layout', gpu=False).like

def test_rows_that_overlap_do_not_turn_a_results_channels_outward(layout, stand_in):
    "Of a sliding window `empty_like` puts the tokens side by side, where the kernel writes channels; and torch is told the layout that there is"
    told = kernels._told[stand_in.rope._qualified_op_name][0]
    window = torch.arange(20.).unfold(0, 16, 1)[None, None]                        # (1, 1, 5, 16), strides (…, 1, 1)
    assert torch.empty_like(window).stride(-1) != 1 and layout(window).stride(-1) == 1
    rnd = random.Random(0)
    for _ in range(400):
        shape = [rnd.choice((1, 2, 3, 5, 17)) for _ in range(3)] + [rnd.choice((2, 8, 16))]
        x = torch.zeros(4000).as_strided(shape, [rnd.choice((0, 1, 2, 7, 8, 16, 40, 85)) for _ in range(3)] + [rnd.choice((1, 1, 1, 2))])
        y = layout(x)
        assert y.shape == x.shape and y.stride(-1) == 1 and told(x, None, None).stride() == y.stride(), (shape, x.stride(), y.stride())
    torch.library.opcheck(stand_in.rope.default, (window, *TABLES))

def test_compiles_for_a_batch_of_unknown_size(wired):
    "Of a size that torch.compile does not know nothing may be asked that it cannot answer"
    x = torch.randn(2, 5, 3, 16).transpose(1, 2)
    torch._dynamo.decorators.mark_unbacked(x, 0)
    assert torch.equal(torch.compile(lambda x: rope(x, *TABLES), fullgraph=True, backend='eager')(x), rope_ref(x, *TABLES))

def test_only_one_result_is_used(wired):
    x, r, w, g = torch.randn(4, 16), torch.randn(4, 16), torch.randn(16), torch.randn(4, 16)
    for which in (0, 1):
        leaves = [leaf(t) for t in (x, r, w)]
        got = torch.autograd.grad(add_rms_norm(*leaves)[which], leaves, g, allow_unused=True)
        if which: assert torch.equal(got[0], g) and torch.equal(got[1], g) and (got[2] is None or not got[2].any())
        else: assert torch.equal(got[0], rms_norm_grad(x + r, w, g)[0]) and torch.equal(got[2], rms_norm_grad(x + r, w, g)[1])

def test_second_derivatives_are_right_or_refused(wired):
    x, w = leaf(torch.randn(1, 5, 2, 16)), leaf(torch.randn(16))
    for out in (rms_norm(x, w), add_rms_norm(x, x, w)[0], qk_norm_rope(x, w, *TABLES)):
        d = torch.autograd.grad(out.square().sum(), x, create_graph=True)[0]
        with pytest.raises(RuntimeError, match='once_differentiable'): d.sum().backward()
    q, v = leaf(torch.randn(1, 2, 5, 16)), torch.randn(1, 2, 5, 16)
    twice = lambda f: torch.autograd.grad(torch.autograd.grad((f(q, *TABLES)**2*v).sum(), q, create_graph=True)[0].square().sum(), q)[0]
    assert rel_error(twice(rope), twice(rope_ref)) < 1e-5

def test_heads_that_the_fused_kernel_does_not_take(wired, stand_in):
    "Ragged or very wide heads go through the two kernels"
    for D, dtype, fused in ((16, BF16, True), (24, BF16, False), (8, F32, True), (12, F32, False), (256, BF16, True), (272, BF16, False), (128, F32, True), (136, F32, False)):
        x, w, t = torch.randn(1, 3, 2, D).to(dtype), torch.randn(D), rope_tables(torch.arange(3), D, dtype=dtype)
        with torch.profiler.profile() as p: y = qk_norm_rope(x, w, *t)
        assert any('qk_norm_rope' in e.key for e in p.key_averages()) == fused, (D, dtype)
        assert torch.equal(y, qk_norm_rope_ref(x, w, *t))
