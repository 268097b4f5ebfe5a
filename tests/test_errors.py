"Every op on a CPU, and the CPU half of a kernel: no further from float64 than torch's own op at the same dtype. `tests/gpu/test_errors.py` asks the same of the kernels."
import pytest, torch, torch.nn.functional as F

from distance import BF16, DTYPES, F32, added, compare, further, gated, head, norm, normed_and_turned, repeated, scored, stepped, three, turned
from xtrain import kernels as k
from xtrain.ops.swiglu import swiglu_ref

CASES = {'rms_norm 48': norm(48, 1000), 'rms_norm 1000': norm(1000, 100), 'add_rms_norm': added(64, 500), 'rope': turned(4, 48, 100), 'qk_norm_rope': normed_and_turned(4, 48, 100), 'swiglu': gated(133, 77),
         'cross_entropy 1000': scored(100, 1000), 'cross_entropy 5003': scored(30, 5003), 'head and loss 2048': head(303, 64, 2048), 'head and loss in two chunks': head(450, 32, 5003), 'AdamW': stepped(10_003)}
CASES |= {f'repeat_kv of {n}': repeated(n) for n in (2, 3, 4, 5, 7, 8, 12, 32)}


@pytest.fixture(autouse=True)
def one_thread():
    n = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n)


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize('case', CASES)
def test_no_further_from_the_truth_than_torchs(case, dtype):
    slack = .03 if 'head' in case and dtype == F32 else .005                     # there the products' own errors, which depend on the BLAS, are nine tenths
    assert not (bad := further(compare(*CASES[case], dtype, 'cpu'), slack)), bad


def test_the_kernels_swiglu():
    "Its own arithmetic, compiled for a CPU"
    ns = k.load_source(k.csrc_path()/'swiglu.cu', gpu=False)
    def draw(randn, dtype):
        a, u, d = (randn(100_000) for _ in range(3))
        _, torchs, want = three(swiglu_ref, swiglu_ref, swiglu_ref, (a, u), d)
        return [ns.swiglu(a, u), *ns.swiglu_backward(d, a, u)], torchs, want
    assert not (bad := further(compare('y dgate dup', draw, F32, 'cpu'))), bad


@pytest.mark.parametrize('wrong', ['a product more', 'one head after the other', 'a gradient rounded twice'])
def test_faults_that_were_there_would_be_seen(wrong):
    "Each of these was in an op once, and tests that allowed 3e-7 on top of torch's error passed"
    def product(randn, dtype):
        a, u = randn(1000, 100), randn(1000, 100)
        return [torch.sigmoid(a)*a*u], [F.silu(a)*u], [F.silu(a.double())*u.double()]
    def order(randn, dtype):
        g = randn(2, 8, 4000)
        return [sum(g.unbind(1)[1:], g[:, 0])], [g.unflatten(1, (2, 2, 2)).sum(3).sum(2).sum(1)], [g.double().sum(1)]
    def twice(randn, dtype):
        p, w = randn(100, 300), randn(300, 100)
        return [(p @ w).to(dtype)*(1/7)], [((p @ w)*(1/7)).to(dtype)], [p.double() @ w.double()/7]
    f, dtype = {'a product more': (product, F32), 'one head after the other': (order, F32), 'a gradient rounded twice': (twice, BF16)}[wrong]
    assert further(compare('x', f, dtype, 'cpu'))
