"Each op in the modes that torch has besides plain eager: a derivative is right or refused, never wrong without a word; and what a kernel is never shown."
import math, types
import pytest, torch
import torch.autograd.forward_ad as fwAD
from xtrain import kernels
from xtrain.ops.attention import causal_mask
from xtrain.ops.cross_entropy import cross_entropy, cross_entropy_ref, linear_cross_entropy
from xtrain.ops.flash_attention import flash_attention
from xtrain.ops.repeat_kv import repeat_kv, repeat_kv_ref
from xtrain.ops.rms_norm import add_rms_norm, add_rms_norm_ref, rms_norm, rms_norm_ref
from xtrain.ops.rope import qk_norm_rope, qk_norm_rope_ref, rope, rope_ref, rope_tables
from xtrain.ops.swiglu import swiglu, swiglu_ref

TABLES, IDS = rope_tables(torch.arange(5), 16), torch.tensor([1, 2, -100, 3])
PAD = torch.tensor([0, 2])
def plain(q, k, v, mask):
    blind = ~mask.any(-1, keepdim=True)
    s = (q @ k.repeat_interleave(2, 1).mT/q.shape[-1]**.5).masked_fill(~(mask | blind), -math.inf)
    return (s.softmax(-1) @ v.repeat_interleave(2, 1)).masked_fill(blind, 0)
OPS = {
    'rms_norm': (rms_norm, rms_norm_ref, [(4, 16), (16,)]),
    'add_rms_norm': (lambda *x: add_rms_norm(*x)[0], lambda *x: add_rms_norm_ref(*x)[0], [(4, 16), (4, 16), (16,)]),
    'rope': (lambda x: rope(x, *TABLES), lambda x: rope_ref(x, *TABLES), [(2, 3, 5, 16)]),
    'qk_norm_rope': (lambda x, w: qk_norm_rope(x, w, *TABLES), lambda x, w: qk_norm_rope_ref(x, w, *TABLES), [(2, 5, 3, 16), (16,)]),
    'swiglu': (swiglu, swiglu_ref, [(4, 16), (4, 16)]),
    'repeat_kv': (lambda x: repeat_kv(x, 3), lambda x: repeat_kv_ref(x, 3), [(2, 2, 5, 16)]),
    'cross_entropy': (lambda z: cross_entropy(z, IDS), lambda z: cross_entropy_ref(z, IDS), [(4, 10)]),
    'linear_cross_entropy': (lambda h, w: linear_cross_entropy(h, w, IDS), lambda h, w: cross_entropy_ref(h @ w, IDS), [(4, 16), (16, 10)]),
    'flash_attention': (flash_attention, lambda q, k, v: plain(q, k, v, causal_mask(5, 5)), [(2, 4, 5, 8), (2, 2, 5, 8), (2, 2, 5, 8)]),
    'flash_attention, padded': (lambda q, k, v: flash_attention(q, k, v, PAD), lambda q, k, v: plain(q, k, v, causal_mask(5, 5, PAD)), [(2, 4, 5, 8), (2, 2, 5, 8), (2, 2, 5, 8)]),
}
each_op = pytest.mark.parametrize('op', OPS)

@pytest.fixture(autouse=True)
def seeded(): torch.manual_seed(0)

def inputs(op): return [torch.randn(s) for s in OPS[op][2]]
def close(a, b): return torch.allclose(a, b, rtol=1e-4, atol=1e-5)

def pushed(f, xs, needs):
    "Forward mode, by hand"
    with fwAD.dual_level(): return fwAD.unpack_dual(f(*[fwAD.make_dual(x.clone().requires_grad_(needs), x.cos()) for x in xs])).tangent
def mapped(f, xs): return torch.func.vmap(f)(*[x[None]*torch.linspace(.5, 2, 3).view(3, *[1]*x.ndim) for x in xs])
TRANSFORMS = {
    'dual': lambda f, xs: pushed(f, xs, False), 'dual with a gradient': lambda f, xs: pushed(f, xs, True),
    'jvp': lambda f, xs: torch.func.jvp(f, tuple(xs), tuple(x.cos() for x in xs))[1],
    'vmap': mapped, 'grad': lambda f, xs: torch.func.grad(lambda *x: f(*x).square().sum())(*xs),
    'vmap of grad': lambda f, xs: mapped(torch.func.grad(lambda *x: f(*x).square().sum()), xs),
}

@each_op
@pytest.mark.parametrize('how', TRANSFORMS)
def test_transforms_are_right_or_refused(op, how):
    f, ref, _ = OPS[op]
    xs = inputs(op)
    want = TRANSFORMS[how](ref, xs)
    try: got = TRANSFORMS[how](f, xs)
    except (RuntimeError, NotImplementedError) as e: assert any(w in str(e) for w in ('autograd.Function', 'forward AD', 'forward mode AD', 'atching rule', 'vmap')), e
    else: assert got is not None and close(got, want)

def test_no_kernel_while_tangents_are_pushed(monkeypatch):
    "An op with no rule for forward mode drops the tangent of an input that needs no gradient, and says nothing"
    x, shown = types.SimpleNamespace(is_cuda=True, dtype=torch.float32, get_device=lambda: 0), object()
    monkeypatch.setattr(kernels, 'kernels', lambda name, device: shown)
    assert kernels.cuda_ops('swiglu', x) is shown
    with fwAD.dual_level(): assert kernels.cuda_ops('swiglu', x) is None
    def f(t): assert kernels.cuda_ops('swiglu', x) is None; return t
    torch.func.jvp(f, (torch.ones(2),), (torch.ones(2),))
    assert kernels.cuda_ops('swiglu', x) is shown

def test_no_kernel_while_tangents_are_pushed_inside_of_what_is_compiled(monkeypatch):
    "Asked before, inside and behind: torch.compile reads a variable of a module once for a whole function"
    monkeypatch.setattr(kernels, 'kernels', lambda name, device: True)
    class Card:
        is_cuda, dtype = True, torch.float32
        def get_device(self): return 0
    x, t = Card(), torch.ones(2)
    def op(t): return t*2 if kernels.cuda_ops('swiglu', x) is None else t*3
    def jvp(t): return torch.func.jvp(op, (t,), (t.new_ones(2),))[1]
    def dual(t):
        with fwAD.dual_level(): return fwAD.unpack_dual(op(fwAD.make_dual(t, t.new_ones(2)))).tangent
    for inner in (jvp, dual):
        torch._dynamo.reset()
        f = torch.compile(lambda t: (op(t), inner(t), op(t)), fullgraph=True, backend='eager')
        for _ in range(2): assert [y.tolist() for y in f(t)] == [[3, 3], [2, 2], [3, 3]]
    torch._dynamo.reset()
    f = torch.compile(op, fullgraph=True, backend='eager')
    assert f(t).tolist() == [3, 3]
    with fwAD.dual_level(): assert f(t).tolist() == [2, 2]
    assert f(t).tolist() == [3, 3]

def test_the_fused_loss_is_refused_in_forward_mode_without_a_gradient_too():
    h, w = inputs('linear_cross_entropy')
    with torch.no_grad(), fwAD.dual_level():
        assert torch.equal(linear_cross_entropy(h, w, IDS), linear_cross_entropy(h, w, IDS))           # nothing is pushed through it
        for xs in ((fwAD.make_dual(h, h.cos()), w), (h, fwAD.make_dual(w, w.cos()))):
            with pytest.raises(NotImplementedError, match='jvp'): linear_cross_entropy(*xs, IDS)

def test_a_backward_inside_of_a_dual_level_finds_its_kernels(monkeypatch):
    "The loss whose logits are made twice, begun outside"
    import xtrain.ops.cross_entropy as module
    h, w = (x.requires_grad_() for x in inputs('linear_cross_entropy'))
    ns = types.SimpleNamespace(cross_entropy=lambda z, t, *_: (cross_entropy_ref(z, t, reduction='none'), torch.zeros(len(z), 2)),
                               grad_columns_=lambda z, g, *_: z.zero_())
    monkeypatch.setattr(module, 'kernels', lambda name, device: ns)
    y = module.HeadLosses.apply(h, w, IDS, -100, 0., 0.)
    with fwAD.dual_level(): assert [tuple(d.shape) for d in torch.autograd.grad(y.sum(), (h, w))] == [tuple(h.shape), tuple(w.shape)]

@each_op
def test_inference_autocast_deterministic(op):
    f, ref, _ = OPS[op]
    xs = inputs(op)
    want = ref(*xs)
    with torch.inference_mode(): assert close(f(*[x.clone() for x in xs]), want)
    leaves = [x.clone().requires_grad_() for x in xs]
    plain = torch.autograd.grad(f(*leaves).square().sum(), leaves)
    with torch.autocast('cpu', torch.bfloat16): y = f(*leaves)
    assert y.dtype == want.dtype and close(y, want)                                 # an op computes in the dtype of its inputs
    assert all(map(torch.equal, torch.autograd.grad(y.square().sum(), leaves), plain))
    torch.use_deterministic_algorithms(True)                                        # and fresh memory is filled with NaN
    try: assert all(map(torch.equal, torch.autograd.grad(f(*leaves).square().sum(), leaves), plain))
    finally: torch.use_deterministic_algorithms(False)

@each_op
def test_shapes_without_numbers(op, monkeypatch):
    "On the meta device, where a model is counted before there is memory for it"
    f = OPS[op][0]
    xs = [x.requires_grad_() for x in inputs(op)]
    y = f(*xs)
    for name in ('IDS', 'PAD', 'TABLES'): monkeypatch.setitem(globals(), name, [t.to('meta') for t in t] if isinstance(t := globals()[name], tuple) else t.to('meta'))
    meta = [x.detach().to('meta').requires_grad_() for x in xs]
    m = f(*meta)
    assert (m.shape, m.dtype, m.device.type) == (y.shape, y.dtype, 'meta')
    assert [(d.shape, d.dtype) for d in torch.autograd.grad(m, meta, torch.ones_like(m))] == [(x.shape, x.dtype) for x in xs]

@each_op
def test_compiled_with_dynamic_shapes(op):
    f, ref, _ = OPS[op]
    torch._dynamo.reset()
    leaves = [x.requires_grad_() for x in inputs(op)]
    y = torch.compile(f, fullgraph=True, dynamic=True, backend='aot_eager')(*leaves)
    assert close(y, ref(*leaves))
    for a, b in zip(torch.autograd.grad(y.square().sum(), leaves), torch.autograd.grad(ref(*leaves).square().sum(), leaves)): assert close(a, b)

LAYOUTS = {
    'windows': lambda s: torch.randn(sum(s)).as_strided(s, [1]*len(s)),             # everything overlaps
    'expanded': lambda s: torch.randn(1).expand(s),
    'turned': lambda s: torch.randn(*s[::-1]).permute(*range(len(s))[::-1]),
    'offset': lambda s: torch.randn(math.prod(s)+3)[3:].view(s),
}

@each_op
@pytest.mark.parametrize('layout', LAYOUTS)
def test_layouts_of_inputs_and_gradients(op, layout):
    f, ref, shapes = OPS[op]
    lay = LAYOUTS[layout]
    xs = [lay(s) for s in shapes]
    want = ref(*xs)
    g = lay(want.shape) if want.ndim else torch.tensor(2.)
    before = [t.clone() for t in (*xs, g)]
    plain, same = [x.contiguous().clone().requires_grad_() for x in xs], [x.as_strided(x.shape, x.stride(), x.storage_offset()).requires_grad_() for x in xs]
    y = f(*same)
    assert close(y, want)
    for a, b in zip(torch.autograd.grad(y, same, g), torch.autograd.grad(ref(*plain), plain, g.contiguous())): assert torch.allclose(a, b, rtol=1e-4, atol=2e-5)
    assert all(map(torch.equal, (*xs, g), before))                                  # nobody writes to what is not its own

@each_op
@pytest.mark.parametrize('bad', [math.nan, math.inf, -math.inf])
def test_not_finite_is_where_the_definition_has_it(op, bad):
    if op.startswith('flash') and math.isinf(bad): pytest.skip('a score of -inf counts as a hidden one')
    f, ref, _ = OPS[op]
    for i in range(len(OPS[op][2])):
        xs = inputs(op)
        xs[i].view(-1)[3] = bad
        assert torch.allclose(f(*xs), ref(*xs), rtol=1e-4, atol=1e-5, equal_nan=True)

@pytest.mark.parametrize('dtype', [torch.int8, torch.int16, torch.int32, torch.uint8, torch.uint16, torch.uint32, torch.uint64])
def test_ids_of_any_integer_dtype(dtype):
    "Files hold uint16, in which torch finds no extremes"
    z, h, w, t = torch.randn(4, 10), torch.randn(4, 16), torch.randn(16, 10), torch.tensor([1, 9, 0, 3])
    assert torch.equal(cross_entropy(z, t.to(dtype)), cross_entropy(z, t)) and torch.equal(linear_cross_entropy(h, w, t.to(dtype)), linear_cross_entropy(h, w, t))
    for f in (lambda t: cross_entropy(z, t), lambda t: linear_cross_entropy(h, w, t)):
        with pytest.raises(ValueError, match=r'id 10 at \(2,\)'): f(torch.tensor([1, 9, 10, 3]).to(dtype))
    if dtype == torch.uint64:
        with pytest.raises(ValueError, match='is outside'): cross_entropy(z, torch.tensor([1, 2**64-2, 0, 3], dtype=dtype))

def test_ids_on_another_device_are_refused():
    for f in (lambda t: cross_entropy(torch.randn(4, 10), t), lambda t: linear_cross_entropy(torch.randn(4, 16), torch.randn(16, 10), t)):
        with pytest.raises(ValueError, match='targets must be on cpu, got meta'): f(torch.zeros(4, dtype=torch.long, device='meta'))
