"The gradient check, the shared argument checks, and the ops rms_norm, swiglu and repeat_kv, against definitions written here again"
import gc
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

from xtrain.gradcheck import gradcheck, max_error, numeric_grad, rel_error
from xtrain.ops.contract import Traffic, acc, check
from xtrain.ops.repeat_kv import group_size, repeat_kv, repeat_kv_grad, repeat_kv_ref
from xtrain.ops.rms_norm import rms_norm, rms_norm_grad, rms_norm_ref
from xtrain.ops.swiglu import PIECE, RECOMPUTE, _SwiGLU, swiglu, swiglu_grad, swiglu_ref

HALVES = [torch.bfloat16, torch.float16]
DTYPES = [torch.float64, torch.float32, *HALVES]
TOL = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
props = settings(max_examples=40, deadline=None, derandomize=True, database=None)


# --- the definitions, independent of the package ---------------------------------------------------------------------------------------------

def their_rms_norm(x, w, eps=1e-6):
    "Qwen3RMSNorm of transformers, line by line"
    dtype = x.dtype
    h = x.to(torch.float64 if dtype == torch.float64 else torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return w.to(dtype) * h.to(dtype)

def their_swiglu(gate, up): return F.silu(gate) * up
def their_repeat_kv(x, group): return torch.repeat_interleave(x, group, dim=1)


# --- making inputs ---------------------------------------------------------------------------------------------------------------------------

LAYOUTS = ['contiguous', 'permuted', 'sliced', 'offset', 'expanded']

def make(shape, dtype, layout, gen, scale=1.):
    "Random numbers of this shape behind the given strides"
    new = lambda *s: (torch.randn(*s, generator=gen, dtype=torch.float64)*scale).to(dtype)
    if layout == 'permuted': return new(*reversed(shape)).permute(*reversed(range(len(shape))))
    if layout == 'sliced': return new(*(2*s for s in shape))[tuple(slice(None, 2*s, 2) for s in shape)]
    if layout == 'offset': return new(math.prod(shape)+3)[3:].view(shape)
    if layout == 'expanded' and len(shape) > 1: return new(1, *shape[1:]).expand(shape)
    return new(*shape)

def leaf(t):
    "A leaf with the same values and strides, that wants a gradient"
    return t.detach().as_strided(t.shape, t.stride(), t.storage_offset()).requires_grad_()

def gradients(f, inputs, g):
    leaves = [leaf(t) for t in inputs]
    return torch.autograd.grad(f(*leaves), leaves, g)

shapes = st.lists(st.integers(1, 7), min_size=1, max_size=4).map(tuple)
layouts = st.sampled_from(LAYOUTS)
dtypes = st.sampled_from(DTYPES)
seeds = st.integers(0, 2**31)

def same(ours, theirs, inputs, g):
    "Forward to the bit; gradients against autograd of the definition in float64, on the same inputs"
    dtype = inputs[0].dtype
    out = ours(*inputs)
    assert torch.equal(out, theirs(*inputs)) and out.dtype == dtype
    assert torch.equal(ours(*(leaf(t) for t in inputs)), out)
    want = gradients(theirs, [t.double() for t in inputs], g.double())
    for a,b,t in zip(gradients(ours, inputs, g), want, inputs):
        assert a.shape == t.shape and a.dtype == t.dtype
        err = (a.double()-b).norm()
        assert err <= TOL[dtype]*b.norm().clamp_min(1e-3), f'{err} of {b.norm()}'


# --- rms_norm --------------------------------------------------------------------------------------------------------------------------------

@props
@given(shapes, dtypes, layouts, layouts, st.sampled_from([1e-6, 1e-5, 1e-2]), seeds)
def test_rms_norm(shape, dtype, lx, lg, eps, seed):
    gen = torch.Generator().manual_seed(seed)
    x, w, g = make(shape, dtype, lx, gen), make(shape[-1:], dtype, 'sliced', gen), make(shape, dtype, lg, gen)
    same(lambda x,w: rms_norm(x, w, eps), lambda x,w: their_rms_norm(x, w, eps), [x, w], g)
    assert torch.equal(rms_norm_ref(x, w, eps), their_rms_norm(x, w, eps))

@pytest.mark.parametrize('x_dtype', DTYPES)
@pytest.mark.parametrize('w_dtype', DTYPES)
def test_rms_norm_master_gain(x_dtype, w_dtype):
    gen = torch.Generator().manual_seed(0)
    x, w, g = make((300, 16), x_dtype, 'contiguous', gen), make((16,), w_dtype, 'contiguous', gen), make((300, 16), x_dtype, 'contiguous', gen)
    y = rms_norm(x, w)
    assert y.dtype == x_dtype and torch.equal(y, their_rms_norm(x, w))
    dx, dw = gradients(rms_norm, [x, w], g)
    assert dx.dtype == x_dtype and dw.dtype == w_dtype
    want = gradients(their_rms_norm, [x.double(), w.to(x_dtype).double()], g.double())
    assert rel_error(dx, want[0]) < TOL[x_dtype]
    exact = max(torch.finfo(x_dtype).eps if x_dtype == torch.float64 else 1e-6, torch.finfo(w_dtype).eps)   # dw loses only its own dtype's digits
    assert rel_error(dw, want[1]) < 2*exact

def test_rms_norm_cases():
    one = lambda n, dtype=torch.float32: torch.ones(n, dtype=dtype)
    assert rms_norm(torch.full((1, 1024), 300., dtype=torch.half), one(1024, torch.half)).eq(1).all()
    assert rel_error(rms_norm(torch.full((1, 64), 1e-3), one(64)), torch.full((1, 64), .7071068)) < 1e-6
    x, w, g = torch.zeros(2, 8), torch.arange(1., 9), torch.arange(16.).view(2, 8) - 7
    assert rms_norm(x, w).eq(0).all()
    dx, dw = gradients(rms_norm, [x, w], g)
    assert rel_error(dx, g*w*1000) < 1e-6 and dw.eq(0).all()
    x, w = (torch.arange(1, 9)/4).bfloat16(), (1.0078125 + torch.arange(8)/128).bfloat16()
    want = torch.tensor([.2001953125, .40234375, .609375, .81640625, 1.0234375, 1.2421875, 1.4609375, 1.6875])
    assert torch.equal(rms_norm(x, w).float(), want)

def test_qk_norm_is_per_head_and_gain_one_is_not_the_identity():
    q = torch.randn(2, 5, 4, 32, generator=torch.Generator().manual_seed(0))*3
    y = rms_norm(q, torch.ones(32))
    assert max_error(y.pow(2).sum(-1), torch.full((2, 5, 4), 32.)) < 1e-3 and not torch.allclose(y, q, rtol=.1)
    loud = q.clone(); loud[:, :, 0] *= 100
    assert torch.equal(rms_norm(loud, torch.ones(32))[:, :, 1:], y[:, :, 1:])

@pytest.mark.parametrize('size', [1e-15, 1e-8, 1., 1e8, 1e15])
def test_rms_norm_range(size):
    "Rows of any size that float32 can square"
    gen = torch.Generator().manual_seed(0)
    x, w, g = make((4, 16), torch.float32, 'contiguous', gen, size), make((16,), torch.float32, 'contiguous', gen), make((4, 16), torch.float32, 'contiguous', gen)
    want = rms_norm_grad(x.double(), w.double(), g.double())
    for a,b in zip(gradients(rms_norm, [x, w], g), want): assert rel_error(a, b) < 2e-6


# --- swiglu ----------------------------------------------------------------------------------------------------------------------------------

@props
@given(shapes, dtypes, layouts, layouts, layouts, seeds)
def test_swiglu(shape, dtype, la, lu, lg, seed):
    gen = torch.Generator().manual_seed(seed)
    same(swiglu, their_swiglu, [make(shape, dtype, la, gen, 3.), make(shape, dtype, lu, gen)], make(shape, dtype, lg, gen))

def test_swiglu_far_out():
    gate = torch.tensor([-1e30, -1e4, -100., -89., 0., 89., 100., 1e4, 1e30], requires_grad=True)
    up = torch.ones(9, requires_grad=True)
    swiglu(gate, up).sum().backward()
    assert torch.equal(gate.grad, torch.tensor([0., 0, 0, gate.grad[3], .5, 1, 1, 1, 1])) and abs(gate.grad[3]) < 1e-30
    assert torch.equal(up.grad, F.silu(gate))

def test_swiglu_keeps_two_tensors():
    kept, (a, u) = set(), (torch.randn(64, 64, requires_grad=True) for _ in range(2))
    def pack(t): kept.add(t.data_ptr()); return t
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t): _SwiGLU.apply(a, u)
    assert kept == {a.data_ptr(), u.data_ptr()}

def test_swiglu_recomputes_where_tensors_are_large_and_no_bit_depends_on_it():
    a, u, g = torch.randn(3, RECOMPUTE//1024, 1024)
    small, large = swiglu(leaf(a[1:]), leaf(u[1:])), swiglu(leaf(a), leaf(u))
    assert '_SwiGLU' in type(large.grad_fn).__name__ and '_SwiGLU' not in type(small.grad_fn).__name__
    for dtype in (torch.float64, torch.float32):
        x, y, d = (t[:64].to(dtype) for t in (a, u, g))
        assert torch.equal(_SwiGLU.apply(x, y), swiglu_ref(x, y))
        assert all(map(torch.equal, gradients(_SwiGLU.apply, [x, y], d), gradients(swiglu_ref, [x, y], d)))

@pytest.mark.parametrize('dtype', HALVES)
@pytest.mark.parametrize('n', [2*PIECE+1, 3*PIECE, 4*PIECE+7])
def test_swiglu_in_pieces_has_the_bits_of_the_whole(dtype, n):
    a, u, g = torch.randn(3, n).to(dtype)
    whole = torch.ops.aten.silu_backward(g.float()*u, a.float()).to(dtype), (F.silu(a.float())*g.float()).to(dtype)
    assert all(map(torch.equal, swiglu_grad(a, u, g), whole))
    apart = torch.randn(2, n).to(dtype).t()[:, :1].t()                             # not contiguous: in one go
    assert all(map(torch.equal, swiglu_grad(a[None], u[None], apart), swiglu_grad(a[None], u[None], apart.contiguous())))

def test_swiglu_is_not_slower_than_eager_autograd():
    "At small and at large sizes; processor time, in turns"
    import time
    torch.set_num_threads(1)
    for shape,n in (((64, 256), 60), ((4096, 1024), 5)):
        a, u, g = (torch.randn(shape) for _ in range(3))
        spent = {swiglu: [], their_swiglu: []}
        for _ in range(n):
            for f,t in spent.items():
                start = time.process_time(); gradients(f, [a, u], g); t.append(time.process_time()-start)
        ours, theirs = (sorted(t)[n//2] for t in spent.values())
        assert ours < 1.35*theirs, (shape, ours, theirs)


@pytest.fixture(scope='module')
def swiglu_half(tmp_path_factory):
    "The CPU half of csrc/swiglu.cu: the arithmetic that the kernel runs, in a loop"
    import os, shutil
    from xtrain import kernels
    if not any(map(shutil.which, (os.environ.get('CXX') or 'c++', 'g++', 'clang++'))): pytest.skip('no C++ compiler')
    before, os.environ['XTRAIN_CACHE'] = os.environ.get('XTRAIN_CACHE'), str(tmp_path_factory.mktemp('cache'))
    try: ns = kernels.load_source(kernels.csrc_path()/'swiglu.cu', gpu=False)
    finally: os.environ.pop('XTRAIN_CACHE') if before is None else os.environ.update(XTRAIN_CACHE=before)
    for f in kernels._definitions['swiglu']: f(ns)
    return ns

def test_swiglu_arithmetic_of_the_kernel(swiglu_half):
    a, u, g = torch.randn(3, 7, 501)
    a = torch.cat([a*4, torch.tensor([-1e4, -100., -88., 0., 88., 100., 1e4]).expand(7, 7)], 1); u, g = (torch.randn(7, 508) for _ in range(2))
    want = swiglu_ref(a.double(), u.double()), *swiglu_grad(a.double(), u.double(), g.double())
    theirs = swiglu_ref(a, u), *gradients(swiglu_ref, [a, u], g)
    for x,t,w in zip((swiglu_half.swiglu(a, u), *swiglu_half.swiglu_backward(g, a, u)), theirs, want): assert x.isfinite().all() and rel_error(x, w) <= 1.5*rel_error(t, w) + 1e-7
    t = a.t().contiguous().t()
    assert torch.equal(swiglu_half.swiglu(t, u[:, :1].expand_as(u)), swiglu_half.swiglu(a, u[:, :1].expand_as(u).contiguous()))
    assert swiglu_half.swiglu(a[:0], u[:0]).shape == (0, 508)

def test_swiglu_kernel_as_torch_sees_it(swiglu_half):
    "Shapes, gradients and compilation, registered once and for both devices"
    a, u, g = torch.randn(3, 4, 9)
    torch.library.opcheck(swiglu_half.swiglu, (leaf(a), leaf(u)))
    torch.library.opcheck(swiglu_half.swiglu_backward, (g, a, u))
    torch._dynamo.reset()
    compiled = torch.compile(swiglu_half.swiglu, fullgraph=True, backend='aot_eager')
    for x,y in zip(gradients(compiled, [a, u], g), gradients(swiglu_ref, [a, u], g)): assert rel_error(x, y) < 1e-6
    a, u = leaf(a), leaf(u)
    d, = torch.autograd.grad(swiglu_half.swiglu(a, u).square().sum(), a, create_graph=True)
    with pytest.raises(RuntimeError, match='once_differentiable'): d.sum().backward()


# --- repeat_kv -------------------------------------------------------------------------------------------------------------------------------

@props
@given(st.tuples(*[st.integers(1, 5)]*4), st.integers(1, 9), dtypes, layouts, layouts, seeds)
def test_repeat_kv(shape, group, dtype, lx, lg, seed):
    gen = torch.Generator().manual_seed(seed)
    B, H, S, D = shape
    x, g = make(shape, dtype, lx, gen), make((B, H*group, S, D), dtype, lg, gen)
    same(lambda x: repeat_kv(x, group), lambda x: their_repeat_kv(x, group), [x], g)
    assert torch.equal(repeat_kv_ref(x, group), their_repeat_kv(x, group))

@props
@given(st.integers(2, 40), st.integers(1, 70), st.sampled_from([torch.float32, *HALVES]), layouts, seeds)
def test_repeat_kv_order(group, D, dtype, layout, seed):
    "The bits are those of fours in pairs, then a pair, then one, in float32, whatever the channels and strides"
    g = make((1, 2*group, 2, D), dtype, layout, torch.Generator().manual_seed(seed))
    for k in range(2):
        x = [g[:, k*group+r].float() for r in range(group)]
        parts = [(x[r]+x[r+1])+(x[r+2]+x[r+3]) for r in range(0, group-3, 4)]
        if group % 4 > 1: parts.append(x[group//4*4]+x[group//4*4+1])
        if group % 2: parts.append(x[-1])
        s = parts[0]
        for part in parts[1:]: s = s + part
        assert torch.equal(repeat_kv_grad(g, group)[:, k], s.to(dtype))

@pytest.mark.parametrize('n_heads, n_kv_heads', [(6, 2), (4, 1), (16, 2), (3, 3), (4, 2), (12, 4)])
def test_head_mapping_by_hand(n_heads, n_kv_heads):
    "Zero queries and keys make attention an average; each KV head holds its number plus one; fresh memory is NaN"
    S, D, group = 5, 3, group_size(n_heads, n_kv_heads)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        average = torch.ones(S, S).tril() / torch.arange(1, S+1)[:, None]
        v = torch.arange(1., n_kv_heads+1).view(1, -1, 1, 1).expand(1, n_kv_heads, S, D).contiguous().requires_grad_()
        out = average @ repeat_kv(v, group)
        out.backward(torch.ones_like(out))
    finally: torch.use_deterministic_algorithms(before)
    heads = torch.tensor([h//group + 1. for h in range(n_heads)])
    assert max_error(out, heads.view(1, -1, 1, 1).expand_as(out)) < 1e-6
    rows = torch.tensor([sum(1/(t+1) for t in range(s, S)) for s in range(S)])*group
    assert max_error(v.grad, rows.view(1, 1, S, 1).expand_as(v)) < 1e-5
    assert max_error(v.grad.sum(2), torch.full((1, n_kv_heads, D), float(S*group))) < 1e-5

def test_six_on_two_in_numbers():
    v = torch.tensor([1., 2.]).view(1, 2, 1, 1)
    assert repeat_kv(v, 3).flatten().tolist() == [1, 1, 1, 2, 2, 2]
    assert repeat_kv_grad(torch.arange(6.).view(1, 6, 1, 1), 3).flatten().tolist() == [3, 12]

def test_group_one_is_the_identity():
    x, g = torch.randn(2, 3, 5, 7), torch.randn(2, 3, 5, 7)
    assert repeat_kv(x, 1) is x and repeat_kv_grad(g, 1) is g
    wants = x.clone().requires_grad_()
    assert repeat_kv(wants, 1) is wants
    repeat_kv(wants*1, 1).backward(g)
    assert torch.equal(wants.grad, g)


# --- promises of every op --------------------------------------------------------------------------------------------------------------------

OPS = {
    'rms_norm': (rms_norm, rms_norm_ref, rms_norm_grad, [(6, 5, 48), (48,)], (6, 5, 48)),
    'swiglu': (swiglu, swiglu_ref, swiglu_grad, [(6, 5, 48), (6, 5, 48)], (6, 5, 48)),
    'swiglu of large tensors': (_SwiGLU.apply, swiglu_ref, swiglu_grad, [(6, 5, 48), (6, 5, 48)], (6, 5, 48)),
    'repeat_kv': (lambda x: repeat_kv(x, 3), lambda x: repeat_kv_ref(x, 3), lambda x,g: repeat_kv_grad(g, 3), [(2, 2, 5, 16)], (2, 6, 5, 16)),
}
each_op = pytest.mark.parametrize('op', OPS)

def inputs_of(op, dtype, seed=0):
    gen = torch.Generator().manual_seed(seed)
    return [make(s, dtype, 'contiguous', gen) for s in OPS[op][3]], make(OPS[op][4], dtype, 'contiguous', gen)

@each_op
def test_gradcheck_of_each_op(op):
    f, ref, grad, shapes, out = OPS[op]
    gen = torch.Generator().manual_seed(1)
    small = [make(tuple(min(n, 4) for n in s), torch.float64, 'contiguous', gen) for s in shapes]
    assert gradcheck(ref, grad, *small) < 1e-7
    assert torch.autograd.gradcheck(f, [t.requires_grad_() for t in small])

@each_op
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_a_hundred_runs_give_the_same_bits(op, dtype):
    inputs, g = inputs_of(op, dtype)
    f, first, clutter = OPS[op][0], None, []
    for i in range(100):
        clutter.append(torch.full((1 + 17*i,), math.nan))                        # shifts what the allocator hands out
        got = (f(*inputs), *gradients(f, inputs, g))
        first = first or got
        assert all(torch.equal(a, b) for a,b in zip(got, first))

@each_op
def test_rows_do_not_depend_on_their_neighbours(op):
    "The first of a batch alone gives the same bits as inside the batch"
    inputs, g = inputs_of(op, torch.float32)
    f, batched = OPS[op][0], lambda t: t.shape[0] == g.shape[0]
    part = [t[:1] if batched(t) else t for t in inputs]
    assert torch.equal(f(*part), f(*inputs)[:1])
    for a,b,t in zip(gradients(f, part, g[:1]), gradients(f, inputs, g), inputs):
        if batched(t): assert torch.equal(a, b[:1])

@each_op
def test_gradients_handed_over_with_stride_zero_or_turned_are_not_written(op):
    inputs, g = inputs_of(op, torch.float32)
    f, grad = OPS[op][0], OPS[op][2]
    ones = torch.ones(()).expand(g.shape)
    for handed in (ones, g.transpose(0, -1).contiguous().transpose(0, -1)):
        before = handed.clone()
        got = gradients(f, inputs, handed)
        assert torch.equal(handed, before)
        for a,b in zip(got, gradients(f, inputs, before.contiguous())): assert rel_error(a, b) < 1e-6
    before = [t.clone() for t in (*inputs, g)]
    grad(*inputs, g)
    assert all(torch.equal(a, b) for a,b in zip((*inputs, g), before))

@pytest.mark.parametrize('op', ['rms_norm', 'swiglu'])
@pytest.mark.parametrize('dtype', HALVES)
def test_half_precision_gradients_round_once(op, dtype):
    "Float32 in between: the error is that of rounding the result, below autograd's on the definition"
    inputs, g = inputs_of(op, dtype)
    f, ref, *_ = OPS[op]
    want = gradients(ref, [t.double() for t in inputs], g.double())
    for a,b,w in zip(gradients(f, inputs, g), gradients(ref, inputs, g), want):
        assert rel_error(a, w) <= 1.02*rel_error(w.to(dtype), w) < rel_error(b, w)

@each_op
def test_gradient_by_only_one_input(op):
    inputs, g = inputs_of(op, torch.float32)
    f, every = OPS[op][0], gradients(OPS[op][0], inputs, g)
    for i in range(len(inputs)):
        ts = [leaf(t) if i == j else t for j,t in enumerate(inputs)]
        out = f(*ts)
        out.backward(g)
        assert torch.equal(ts[i].grad, every[i]) and all(t.grad is None for j,t in enumerate(ts) if j != i)
    assert not f(*inputs).requires_grad
    with torch.no_grad(): assert not f(*(leaf(t) for t in inputs)).requires_grad

@each_op
def test_backward_twice_and_accumulation(op):
    inputs, g = inputs_of(op, torch.float32)
    leaves = [leaf(t) for t in inputs]
    out = OPS[op][0](*leaves)
    out.backward(g, retain_graph=True); out.backward(g)
    for t,d in zip(leaves, gradients(OPS[op][0], inputs, g)): assert torch.equal(t.grad, 2*d)

@each_op
def test_second_derivative_is_refused(op):
    if op == 'swiglu': # torch's own autograd, which knows it
        assert torch.autograd.gradgradcheck(swiglu, [leaf(t[:1, :1, :4].double()) for t in inputs_of(op, torch.float32)[0]])
        return
    inputs, g = inputs_of(op, torch.float32)
    leaves = [leaf(t) for t in inputs]
    d = torch.autograd.grad(OPS[op][0](*leaves).square().sum(), leaves, create_graph=True)
    with pytest.raises(RuntimeError, match='once_differentiable'): d[0].sum().backward()

@each_op
def test_changing_an_input_before_backward_is_noticed(op):
    "Saved inputs are versioned: an in-place change in between is an error, never a wrong gradient"
    if op == 'repeat_kv': pytest.skip('keeps nothing')
    inputs, g = inputs_of(op, torch.float32)
    leaves = [leaf(t) for t in inputs]
    work = leaves[0]*1
    out = OPS[op][0](work, leaves[1])
    work.mul_(2)
    with pytest.raises(RuntimeError, match='inplace'): out.backward(g)

@pytest.mark.parametrize('f, shapes', [(rms_norm, [(0, 8), (8,)]), (rms_norm, [(2, 0, 3, 8), (8,)]), (rms_norm, [(3, 0), (0,)]), (swiglu, [(0, 8), (0, 8)]),
    (swiglu, [(0,), (0,)]), (lambda x: repeat_kv(x, 3), [(0, 2, 5, 8)]), (lambda x: repeat_kv(x, 3), [(1, 0, 5, 8)]), (lambda x: repeat_kv(x, 3), [(1, 2, 0, 8)])])
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_empty(f, shapes, dtype):
    ts = [torch.zeros(s, dtype=dtype, requires_grad=True) for s in shapes]
    out = f(*ts)
    assert out.numel() == 0 and out.dtype == dtype
    out.sum().backward()
    assert all(t.grad.shape == t.shape and t.grad.eq(0).all() for t in ts)

@each_op
def test_traces_without_a_graph_break(op):
    inputs, g = inputs_of(op, torch.float32)
    f = OPS[op][0]
    torch._dynamo.reset()
    compiled = torch.compile(f, fullgraph=True, backend='aot_eager')
    assert rel_error(compiled(*inputs), f(*inputs)) < 1e-6
    for a,b in zip(gradients(compiled, inputs, g), gradients(f, inputs, g)): assert rel_error(a, b) < 1e-6

@each_op
def test_memory_is_given_back(op):
    "Nothing holds on to the inputs once the result is gone"
    inputs, g = inputs_of(op, torch.float32)
    gradients(OPS[op][0], inputs, g)
    import weakref
    ref = weakref.ref(inputs[0]); del inputs
    gc.collect()
    assert ref() is None

one, meta = torch.ones(2, 4), torch.device('meta')
@pytest.mark.parametrize('call, says', [
    (lambda: rms_norm(one, torch.ones(3)), 'w must have shape (4,), got (3,)'),
    (lambda: rms_norm(one, torch.ones(4, 1)), 'w must have shape (4,), got (4, 1)'),
    (lambda: rms_norm(one, torch.ones(1)), 'w must have shape'),                                  # would broadcast
    (lambda: rms_norm(torch.ones(()), torch.ones(1)), 'x must have shape'),
    (lambda: rms_norm(one.long(), torch.ones(4)), 'x must be floating-point, got torch.int64'),
    (lambda: rms_norm(one, torch.ones(4).int()), 'w must be floating-point'),
    (lambda: rms_norm(one, torch.ones(4, device=meta)), 'w must be on cpu, got meta'),
    (lambda: rms_norm(one, [1.]*4), 'w must be a tensor, got list'),
    (lambda: swiglu(one, torch.ones(4)), 'up must have shape (2, 4), got (4,)'),
    (lambda: swiglu(one, one.double()), 'up must be torch.float32, got torch.float64'),
    (lambda: swiglu(one.bool(), one), 'gate must be floating-point'),
    (lambda: swiglu(one, one.to(meta)), 'up must be on cpu, got meta'),
    (lambda: swiglu(None, one), 'gate must be a tensor, got NoneType'),
    (lambda: repeat_kv(one, 2), 'x must have shape'),
    (lambda: repeat_kv(one.view(1, 2, 2, 2).int(), 2), 'x must be floating-point'),
    (lambda: repeat_kv(one.view(1, 2, 2, 2), 0), 'group must be a positive integer, got 0'),
    (lambda: repeat_kv(one.view(1, 2, 2, 2), -2), 'group must'),
    (lambda: repeat_kv(one.view(1, 2, 2, 2), 2.), 'group must be a positive integer, got 2.0'),
    (lambda: group_size(6, 4), 'n_heads must be a multiple of n_kv_heads, got n_heads=6, n_kv_heads=4'),
    (lambda: group_size(6, 0), 'n_kv_heads=0'), (lambda: group_size(0, 2), 'n_heads=0'), (lambda: group_size(2, 4), 'n_heads=2'),
    (lambda: check('ids', one, integer=True), 'ids must hold integers, got torch.float32'),
])
def test_errors_name_the_argument(call, says):
    with pytest.raises(ValueError) as e: call()
    assert says in str(e.value) and '\n' not in str(e.value)

def test_fewer_bytes_than_autograd():
    "Counted, not timed: bytes moved and freshly allocated, forward and backward"
    def cost(f, *shapes):
        ts = [torch.randn(s, requires_grad=True) for s in shapes]
        g = torch.randn(shapes[0])
        with Traffic() as t: torch.autograd.grad(f(*ts), ts, g)
        return (t.read+t.written)/g.nbytes, t.fresh/g.nbytes
    (moved, fresh), (moved0, fresh0) = cost(rms_norm, (512, 256), (256,)), cost(lambda x,w: F.rms_norm(x, (256,), w, 1e-6), (512, 256), (256,))
    assert moved < .72*moved0 and fresh <= 3.1 < fresh0
    (moved, fresh), (moved0, fresh0) = cost(_SwiGLU.apply, (512, 256), (512, 256)), cost(their_swiglu, (512, 256), (512, 256))
    assert moved <= moved0+2 and fresh <= 3 < fresh0


# --- gradcheck itself ------------------------------------------------------------------------------------------------------------------------

def layer(x, w): return (x@w).tanh()
def layer_grad(x, w, g):
    d = g*(1-layer(x, w)**2)
    return d@w.T, x.T@d

def layer_inputs():
    gen = torch.Generator().manual_seed(0)
    return [torch.randn(s, dtype=torch.float64, generator=gen) for s in ((3, 4), (4, 5))]

def test_gradcheck_accepts_and_reports():
    res = gradcheck(layer, layer_grad, *layer_inputs())
    assert res < 1e-7 and res.n == 32 and repr(res) == f'worst relative error {float(res):.1e} over 32 inputs' == str(res)

@pytest.mark.parametrize('i, j', [(0, (0, 0)), (0, (2, 3)), (1, (3, 4)), (1, (1, 2))])
@pytest.mark.parametrize('spoil', [lambda v: v*(1+1e-5), lambda v: v*math.nan, lambda v: v*math.inf, lambda v: -v, lambda v: v+1])
def test_gradcheck_points_at_one_wrong_element(i, j, spoil):
    def bad(x, w, g):
        ds = layer_grad(x, w, g)
        ds[i][j] = spoil(ds[i][j])
        return ds
    with pytest.raises(AssertionError) as e: gradcheck(layer, bad, *layer_inputs())
    said = str(e.value)
    right = layer_grad(*layer_inputs(), torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))[i][j].item()
    assert 'relative error' in said and f'inputs[{i}] at {j}' in said
    assert abs(float(said.rsplit(' ', 1)[1])-right) < 1e-7*abs(right) and 'by hand' in said

def test_gradcheck_refuses():
    x, w = layer_inputs()
    for bad in (x.float(), x.long(), [1.], None):
        with pytest.raises(ValueError, match=r'inputs\[1\] must be a float64 tensor'): gradcheck(layer, layer_grad, w, bad)
    with pytest.raises(ValueError, match='rounding'): gradcheck(lambda x: x.float(), lambda x,g: g, x)
    for wrong, says in ((lambda x,w,g: layer_grad(x, w, g)[0], '1 gradients for 2'), (lambda x,w,g: (*layer_grad(x, w, g), None), '3 gradients for 2'),
                        (lambda x,w,g: (layer_grad(x, w, g)[0].T, None), 'inf'), (lambda x,w,g: (layer_grad(x, w, g)[0].float(), None), 'float32')):
        with pytest.raises(AssertionError, match=says): gradcheck(layer, wrong, x, w)

def test_gradcheck_leaves_the_world_alone():
    x, w = layer_inputs()
    before, state = (x.clone(), w.clone()), torch.get_rng_state()
    assert gradcheck(lambda y: y*x, lambda y,g: g*x, x) < 1e-7                     # x itself stays put while y moves
    gradcheck(layer, layer_grad, x.requires_grad_(), w)
    assert torch.equal(x, before[0]) and torch.equal(w, before[1]) and torch.equal(state, torch.get_rng_state()) and x.grad is None

@pytest.mark.parametrize('x', [torch.randn(3, 1, dtype=torch.float64).expand(3, 4), torch.randn(4, 3, dtype=torch.float64).T, torch.randn(8, dtype=torch.float64)[::2],
                               torch.randn((), dtype=torch.float64), torch.zeros(0, 3, dtype=torch.float64)], ids=['expanded', 'turned', 'sliced', 'no axes', 'empty'])
def test_gradcheck_takes_any_layout(x):
    assert gradcheck(torch.sin, lambda x,g: g*x.cos(), x) < 1e-7
    assert gradcheck(lambda x: x, lambda x,g: g, x) < 1e-12                       # f may return its input itself
    if x.numel():
        with pytest.raises(AssertionError): gradcheck(torch.sin, lambda x,g: g*x.cos()*1.001, x)

def test_numeric_grad_agrees_with_autograd():
    x, w = (t.requires_grad_() for t in layer_inputs())
    g = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    for i,d in enumerate(torch.autograd.grad(layer(x, w), (x, w), g)):
        with torch.no_grad(): assert rel_error(numeric_grad(layer, (x, w), i, g), d) < 1e-9

def test_error_measures():
    a = torch.tensor([3., 4.])
    assert rel_error(a, a) == max_error(a, a) == 0 and abs(rel_error(a+torch.tensor([0., .5]), a)-.1) < 1e-7 and max_error(a+torch.tensor([.25, 0.]), a) == .25
    for bad in (math.nan, math.inf):
        assert rel_error(torch.tensor([bad, 4.]), a) == max_error(torch.tensor([bad, 4.]), a) == math.inf
    assert rel_error(a.bfloat16()+1, a.double()) > 0 and rel_error(torch.zeros(0), torch.zeros(0)) == max_error(torch.zeros(0), torch.zeros(0)) == 0
    for f in (rel_error, max_error):
        with pytest.raises(ValueError, match='shape'): f(torch.ones(3, 1), torch.ones(3))

def test_acc_and_traffic():
    assert [acc(torch.ones(1, dtype=d)).dtype for d in DTYPES] == [torch.float64, torch.float32, torch.float32, torch.float32]
    a = torch.ones(1000)
    with Traffic() as t: b = a+a; b.mul_(a); a.view(10, 100).t(); torch.empty(10); torch.mul(a, 2, out=b)
    assert (t.read, t.written, t.fresh) == (8000+8000+4000, 12000, 4000)
