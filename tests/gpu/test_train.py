"The training loop on a real card: it waits only to log, resumes bit for bit, holds still after a NaN, and says which kernels run."
import json, math, threading
from collections import Counter
from dataclasses import replace
import pytest, torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from xtrain import train as T
from xtrain.checkpoint import checkpoints
from xtrain.config import UserError
from xtrain.model import TinyTransformer
from xtrain.recipe import TrainConfig
from xtrain.train import read_metrics, train

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason='no GPU')

@pytest.fixture
def cfg(tmp_path):
    words = 'the cat a dog saw ran to tree house red blue and then slept home'.split()
    (tmp_path/'tales.jsonl').write_text(''.join(json.dumps(dict(text=' '.join(words[(i*j*7 + i + j) % len(words)] for j in range(5 + i % 40)) + '.'))+'\n' for i in range(120)))
    return TrainConfig(vocab_size=280, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=48, seq_len=32, batch_size=4, steps=12, lr=1e-2, warmup=3, eval_every=0, sample_every=0, save_every=6, keep=0,
                       device='cuda', data=str(tmp_path/'tales.jsonl'), out=str(tmp_path/'run'))

def quiet(cfg): return train(cfg, show='nothing')
def tensors(cfg, step): return {n: t for f in ('model', 'optimizer') for n, t in load_file(checkpoints(cfg.out)[step]/f'{f}.safetensors').items()}

@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_same_bits_twice_and_after_a_resume(cfg, tmp_path, dtype):
    a, b, c = (replace(cfg, dtype=dtype, out=str(tmp_path/n)) for n in 'abc')
    quiet(a); quiet(b)
    assert [r['loss'] for r in read_metrics(tmp_path/'a/metrics.jsonl')] == [r['loss'] for r in read_metrics(tmp_path/'b/metrics.jsonl')]
    quiet(replace(c, steps=6, decay_steps=12)); quiet(replace(c, decay_steps=12, resume=True))
    x, y = tensors(a, 12), tensors(c, 12)
    assert x.keys() == y.keys() and all(torch.equal(x[n], y[n]) for n in x)

def test_fifty_steps_twice_where_atomics_would_show(cfg, tmp_path):
    "A16: small shapes look the same by luck; 8 rows of 2,048 tokens of 280 ids, 16 heads on 4 of 128"
    text = (tmp_path/'tales.jsonl').read_text()
    (tmp_path/'many.jsonl').write_text(text*40)
    cfg = replace(cfg, dim=512, n_heads=16, n_kv_heads=4, head_dim=128, ffn_dim=1024, seq_len=2048, batch_size=8, steps=50, lr=1e-3, save_every=0, dtype='bfloat16', data=str(tmp_path/'many.jsonl'))
    a, b = (replace(cfg, out=str(tmp_path/n)) for n in 'ab')
    quiet(a)
    side, x, stop = torch.cuda.Stream(), torch.randn(2048, 2048, device='cuda'), threading.Event()
    def load():
        with torch.cuda.stream(side):
            while not stop.is_set(): x @ x; side.synchronize()
    other = threading.Thread(target=load); other.start()
    try: quiet(b)
    finally: stop.set(); other.join()
    assert [r['loss'] for r in read_metrics(tmp_path/'a/metrics.jsonl')] == [r['loss'] for r in read_metrics(tmp_path/'b/metrics.jsonl')]
    x, y = tensors(a, 50), tensors(b, 50)
    assert all(torch.equal(x[n], y[n]) for n in x)

class Waits(TorchDispatchMode):
    "Counts the calls that wait for the GPU"
    def __init__(self): super().__init__(); self.seen = Counter()
    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        name = f._schema.name
        if name == 'aten::_local_scalar_dense' and args[0].is_cuda: self.seen['item'] += 1
        out = f(*args, **(kwargs or {}))
        if name in ('aten::_to_copy', 'aten::copy_') and isinstance(out, torch.Tensor) and not out.is_cuda and any(isinstance(a, torch.Tensor) and a.is_cuda for a in args): self.seen['to host'] += 1
        return out

def test_it_waits_only_to_log(cfg):
    "30 steps, logged every 10: three fetches, one at each log, and nothing else but the checkpoint"
    cfg = replace(cfg, steps=30, log_every=10, save_every=0)
    quiet(replace(cfg, out=cfg.out+'-warm', steps=2))
    with Waits() as w: quiet(cfg)
    params = len(TinyTransformer(cfg.model_config(280)).params())
    assert w.seen['item'] <= 3, w.seen
    assert w.seen['to host'] <= 3 + 4*params + 10, w.seen            # the logs; weights, moments and counts of the one checkpoint, and whether they are finite

def test_steps_between_logs_do_not_wait(cfg):
    cfg, seen = replace(cfg, steps=20, log_every=20, save_every=0), []
    step = T.AdamW.step
    def watched(self, *a):
        out = step(self, *a); seen.append(1)
        torch.cuda.set_sync_debug_mode('error' if 3 <= len(seen) < 19 else 'default')   # the first steps make the state, the last one is logged
        return out
    T.AdamW.step = watched
    try: quiet(cfg)
    finally: T.AdamW.step = step; torch.cuda.set_sync_debug_mode('default')
    assert len(seen) == 20

@pytest.mark.parametrize('log_every', [1, 10])
def test_one_bad_step_changes_nothing(cfg, tmp_path, monkeypatch, log_every):
    "B12: the host hears of it steps later; the weights are those of the step before"
    good = replace(cfg, out=str(tmp_path/'good')); quiet(good)
    loss, calls, kept, make = TinyTransformer.loss, [], {}, T.make_optimizer
    def bad(self, ids, t, reduction='mean'):
        calls.append(1)
        return loss(self, ids, t, reduction=reduction)*(math.nan if len(calls) == 7 else 1.)
    monkeypatch.setattr(TinyTransformer, 'loss', bad)
    monkeypatch.setattr(T, 'make_optimizer', lambda m, c: kept.setdefault('opt', make(kept.setdefault('m', m), c)))
    with pytest.raises(UserError, match=r'step 7: the gradient is not finite .*weights of step 6'): quiet(replace(cfg, out=str(tmp_path/'bad'), log_every=log_every, save_every=0))
    t = load_file(checkpoints(good.out)[6]/'model.safetensors')
    assert all(torch.equal(t[n], p.cpu()) for n, p in kept['m'].params().items())

def test_kernels_are_named(cfg, capfd):
    train(replace(cfg, steps=2), show='lines')
    assert 'kernels: CUDA kernels (' in capfd.readouterr().err

def test_cpu_and_gpu_learn_alike(cfg, tmp_path):
    a, b = replace(cfg, dtype='float32', attention='composed', out=str(tmp_path/'gpu')), replace(cfg, dtype='float32', attention='composed', device='cpu', out=str(tmp_path/'cpu'))
    x, y = quiet(a), quiet(b)
    assert x.loss == pytest.approx(y.loss, rel=2e-3)
