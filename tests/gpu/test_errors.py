"Every op on a GPU, its results and gradients: no further from float64 than torch's own op at the same dtype, over sixteen seeds."
import pytest, torch
from distance import DTYPES, added, compare, further, gated, head, norm, normed_and_turned, repeated, scored, stepped, turned

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason='no GPU')
CASES = {f'rms_norm {r}x{D}': norm(D, r) for D, r in ((48, 40000), (128, 8192), (128, 524288), (1000, 2048), (1001, 2048), (1024, 2048), (1024, 65536), (3000, 700), (4096, 2048), (4096, 16384), (8192, 512), (11008, 512), (20000, 256))}
CASES |= {f'add_rms_norm {r}x{D}': added(D, r) for D, r in ((128, 8192), (1000, 2048), (1024, 65536), (4096, 2048), (5120, 512))}
CASES |= {f'rope {H}x{D}': turned(H, D, 500) for H, D in ((8, 128), (5, 48))}
CASES |= {f'qk_norm_rope {H}x{D}, {T} tokens': normed_and_turned(H, D, T) for H, D, T in ((32, 128, 500), (16, 128, 8192), (5, 48, 500), (8, 96, 500), (8, 64, 4096), (2, 256, 500), (4, 16, 2000))}
CASES |= {f'swiglu {s}': gated(*s) for s in ((1024, 1000), (333, 77))}
CASES |= {f'repeat_kv of {n}': repeated(n) for n in (2, 3, 4, 5, 6, 7, 8, 12, 16, 32)}
CASES |= {f'cross_entropy {r}x{V}': scored(r, V) for r, V in ((4096, 1000), (300, 50257), (100, 151936))}
CASES |= {f'head and loss {a}': head(*a) for a in ((2048, 512, 50257), (1030, 64, 2048), (3000, 256, 5003))}
CASES |= {f'AdamW {n}': stepped(n) for n in (1_000_003,)}



@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize('case', CASES)
def test_no_further_from_the_truth_than_torchs(case, dtype, record_property):
    rows = compare(*CASES[case], dtype, 'cuda')
    record_property('errors', [r[1:3] for r in rows])                            # for the table at the end
    assert not (bad := further(rows)), bad
