"Llama and Qwen2, by their switches, on a real card; and weights that go straight to it and come back."
import pytest, torch
from xtrain.config import ModelConfig
from xtrain.gradcheck import rel_error
from xtrain.hf import export_hf, import_model
from xtrain.model import TinyTransformer

CFG = dict(vocab_size=101, dim=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=32, ffn_dim=96, max_seq_len=64)
KINDS = dict(qwen3=dict(), llama=dict(qk_norm=False), qwen2=dict(qk_norm=False, qkv_bias=True))

def noisy(cfg, **kw):
    m = TinyTransformer(cfg, seed=0, std=.1, **kw)
    with torch.no_grad():
        for n,p in m.params().items():
            if p.ndim == 1: p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(len(n)))*.2)
    return m

@pytest.mark.parametrize('kind', ['llama', 'qwen2'])
def test_the_relatives_on_a_gpu_are_those_on_a_cpu(kind):
    "float32, both of torch's paths: logits, loss and every gradient; bfloat16, every path: as near as its rounding"
    cfg = ModelConfig(**CFG | KINDS[kind])
    ids, targets = torch.randint(101, (2, 3, 33), generator=torch.Generator().manual_seed(0))
    for path in ('composed', 'sdpa'):
        m, n = noisy(cfg, attention=path), noisy(cfg, attention=path).cuda()
        assert rel_error(n(ids.cuda()).cpu(), m(ids)) < 1e-5
        for mm, dev in ((m, 'cpu'), (n, 'cuda')): mm.loss(ids.to(dev), targets.to(dev)).backward()
        for (name, p), q in zip(m.params().items(), n.params().values()): assert rel_error(q.grad.cpu(), p.grad) < (1e-2 if name.endswith('bk') else 1e-4), name   # A key's bias: nearly all of its gradient cancels
    for path in ('composed', 'sdpa', 'flash'):
        h = noisy(cfg, attention=path, dtype=torch.bfloat16).cuda()
        h.loss(ids.cuda(), targets.cuda()).backward()
        for (name, p), q in zip(m.params().items(), h.params().values()): assert name.endswith('bk') or rel_error(q.grad.cpu(), p.grad) < .1, (path, name)

@pytest.mark.parametrize('kind', KINDS)
def test_weights_go_straight_to_the_card_and_back(kind, tmp_path):
    cfg = ModelConfig(**CFG | KINDS[kind])
    export_hf(noisy(cfg), None, tmp_path/'a'); export_hf(noisy(cfg).cuda(), None, tmp_path/'b')
    assert (tmp_path/'a/model.safetensors').read_bytes() == (tmp_path/'b/model.safetensors').read_bytes()
    m, n = import_model(tmp_path/'a', dtype=torch.bfloat16), import_model(tmp_path/'a', device='cuda', dtype=torch.bfloat16)
    assert all(q.is_cuda and torch.equal(p, q.cpu()) and p.stride() == q.stride() for p,q in zip(m.params().values(), n.params().values()))
