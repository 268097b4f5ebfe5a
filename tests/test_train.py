"The recipe and the loop: one mean, exact resume, signals, faults, what is written down."
import hashlib, json, math, os, shutil, signal, subprocess, sys, textwrap, time
from dataclasses import asdict, replace
from pathlib import Path
import pytest, torch
from safetensors.torch import load_file
from xtrain import train as T
from xtrain.checkpoint import checkpoints, latest_checkpoint, new_run
from xtrain.config import ModelConfig, UserError
from xtrain.model import TinyTransformer
from xtrain.recipe import PRESETS, TrainConfig, changes, lr_at, make_config
from xtrain.tokenizer import Tokenizer
from xtrain.optim import clip_grads, grad_norm
from xtrain.train import accumulate, make_optimizer, read_metrics, train

ENV = os.environ | dict(OMP_NUM_THREADS='1')
SMALL = dict(vocab_size=280, dim=16, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=4, ffn_dim=24, seq_len=16, batch_size=2, steps=12, lr=1e-2, warmup=3,
             eval_every=4, eval_tokens=100, sample_every=0, save_every=4, keep=0, device='cpu')

@pytest.fixture(scope='module')
def text(tmp_path_factory):
    p = tmp_path_factory.mktemp('text')/'tales.jsonl'
    words = 'the cat a dog saw ran to tree house red blue and then slept home'.split()
    docs = [' '.join(words[(i*j*7 + i + j) % len(words)] for j in range(5 + i % 40)) + '.' for i in range(120)]
    p.write_text(''.join(json.dumps(dict(text=d))+'\n' for d in docs))
    return str(p)

@pytest.fixture
def cfg(text, tmp_path): return TrainConfig(**SMALL, data=text, out=str(tmp_path/'run'))

def quiet(cfg): return train(cfg, show='nothing')
def again(cfg, **kw): return replace(cfg, resume=True, **kw)
def digest(d): return {str(p.relative_to(d)): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(Path(d).rglob('*')) if p.is_file()}
def losses(out): return {r['step']: {k: v for k,v in r.items() if k != 'tokens_per_second'} for r in read_metrics(Path(out)/'metrics.jsonl')}
def at(src, dst, step):
    "A copy of a run as it stood at a checkpoint, with metrics that go further, as after a crash"
    shutil.copytree(src, dst)
    for k,p in checkpoints(dst).items():
        if k > step: shutil.rmtree(p)
    return dst

CHILD = '''
    import json, sys; from xtrain.recipe import TrainConfig; from xtrain.train import train; from xtrain import train as T, checkpoint as C
    {patch}
    try: sys.exit(train(TrainConfig(**json.loads(sys.argv[1])), show='lines').exit_code)
    except ValueError as e: print('xtrain:', e, file=sys.stderr); sys.exit(1)'''

def child(cfg, patch='', limit=None, **kw):
    "Train in a new process"
    pre = f'ulimit -f {limit}; ' if limit else ''
    code = textwrap.dedent(CHILD).replace('{patch}', textwrap.dedent(patch))
    p = subprocess.Popen(['bash', '-c', pre + 'exec "$@"', '-', sys.executable, '-W', 'ignore', '-c', code, json.dumps(asdict(cfg))], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENV, **kw)
    return p

def finish(p):
    out, err = p.communicate(timeout=120)
    return p.returncode, err

# ---- learning rate -------------------------------------------------------------------------------------------

def test_lr_table():
    c = TrainConfig(lr=1e-3, min_lr=1e-4, warmup=4, steps=20)
    want = [.0002, .0004, .0006, .0008, .001, .000991353, .00096574, .000924147, .000868198, .000800011]
    assert [lr_at(i, c) for i in range(5)] == pytest.approx(want[:5], abs=1e-12) and [lr_at(i, c) for i in range(6)] == pytest.approx(want[:6], abs=1e-9)
    assert lr_at(12, c) == pytest.approx(.00055, abs=1e-12) and lr_at(19, c) == pytest.approx(.000108647, abs=1e-9) and lr_at(20, c) == lr_at(10**6, c) == 1e-4

@pytest.mark.parametrize('schedule', ['cosine', 'linear', 'wsd', 'constant'])
@pytest.mark.parametrize('warmup', [0, 1, 19, 20, 21, 500])
@pytest.mark.parametrize('steps', [1, 2, 20])
def test_lr_edges(schedule, warmup, steps):
    c = TrainConfig(lr=1e-3, min_lr=1e-4, warmup=warmup, steps=steps, schedule=schedule)
    e = [lr_at(i, c) for i in range(60)]
    assert all(1e-4 <= v <= 1e-3 for v in e) and (warmup >= steps or max(e) == e[warmup] == 1e-3)
    assert schedule == 'constant' or e[steps:] == [1e-4]*(60-steps)

@pytest.mark.parametrize('kw', [dict(data=''), dict(val_data=''), dict(out=''), dict(tokenizer=''), dict(text_key=''), dict(seed=2**63), dict(vocab_size=10**400), dict(lr=10**400), dict(steps=2**63)], ids=lambda kw: next(iter(kw)))
def test_recipe_refuses_what_no_library_would(kw):
    "An empty path is the folder where one stands; a number beyond 2**63 ends in somebody's OverflowError"
    (name, v), = kw.items()
    with pytest.raises(UserError, match=f'--{name.replace("_", "-")} must be'): TrainConfig(**kw)
    if name == 'seed': TrainConfig(seed=2**63-1)

def test_recipe_refuses():
    for kw, say in ((dict(lr=-1.), '--lr must be a number above 0'), (dict(lr='1'), '--lr'), (dict(steps=True), '--steps'), (dict(n_kv_heads=5), 'n_kv_heads=5'), (dict(dtype='fp8'), '--dtype must be one of auto, float32, bfloat16'),
                    (dict(warmup=-1), '--warmup'), (dict(clip=math.nan), '--clip'), (dict(min_lr=1.), 'above --lr'), (dict(seed=-1), '--seed'), (dict(data=None), '--data'), (dict(head_dim=7), 'head_dim=7')):
        with pytest.raises(UserError, match=say): TrainConfig(**kw)
    for name in PRESETS: assert make_config(name, lr=1e-3).lr == 1e-3
    with pytest.raises(UserError, match='--preset must be one of'): make_config('no')
    assert make_config('t9').model_config(50257).num_params() == 3_257_824 and len(make_config('t15').model_config(50257).shapes()) == 47

# ---- one mean ------------------------------------------------------------------------------------------------

def uneven():
    ids = torch.randint(0, 90, (4, 64), generator=torch.Generator().manual_seed(1))
    t = ids.roll(-1, 1).clone()
    for row,k in zip(t, (1, 3, 60, 64)): row[k:] = -100
    return ids, t

def model90(): return TinyTransformer(ModelConfig(90, 32, 2, 4, 2, 8, 48, 64), seed=0)
def flat(m): return torch.cat([p.grad.flatten() for p in m.parameters()])

@pytest.mark.parametrize('rows', [1, 2, 3])
def test_the_split_does_not_matter(rows):
    a, b = model90(), model90()
    want, got = accumulate(a, *uneven(), 4), accumulate(b, *uneven(), rows)
    ref = a.loss(*uneven())
    assert got.item() == pytest.approx(want.item(), rel=1e-6) and want.item() == pytest.approx(ref.item(), rel=1e-6)
    assert ((flat(a)-flat(b)).norm()/flat(a).norm()).item() < 1e-5

def test_five_rows_in_windows_of_four():
    ids, t = uneven(); ids, t = torch.cat([ids, ids[:1]]), torch.cat([t, t[3:]])
    a, b = model90(), model90()
    accumulate(a, ids, t, 5); accumulate(b, ids, t, 4)
    assert ((flat(a)-flat(b)).norm()/flat(a).norm()).item() < 1e-5

def test_scalar_example():
    class Sums: # Two micro-batches: 2.0 over one token, 30.0 over sixty
        def __init__(self): self.w = torch.ones((), requires_grad=True)
        def loss(self, ids, t, reduction): return self.w*(2. if (t != -100).sum() == 1 else 30.)
    t = torch.full((2, 60), -100); t[0, 0] = 1; t[1] = 1
    assert accumulate(m := Sums(), torch.zeros_like(t), t, 1).item() == pytest.approx(.524590, abs=1e-6) == m.w.grad.item()

def test_nothing_to_score():
    ids, t = uneven()
    m = model90(); loss = accumulate(m, ids, torch.full_like(t, -100), 2)
    assert loss == 0 and (flat(m) == 0).all()

# ---- clipping -------------------------------------------------------------------------------------------------

def test_clip():
    g = [torch.full((10, 10), 1e20)]
    assert clip_grads(g, 1.).item() == pytest.approx(1e21, rel=1e-6) and torch.allclose(g[0], torch.full((10, 10), .1), rtol=1e-5)
    g = [torch.tensor([3e38, 3e38])]; clip_grads(g, 1.); assert torch.allclose(g[0], torch.tensor([.5**.5]*2), rtol=1e-2)
    g = [torch.tensor([.3]), torch.tensor([[.4]])]; was = [t.clone() for t in g]
    assert clip_grads(g, 1.).item() == pytest.approx(.5) and all(map(torch.equal, g, was))
    g = [torch.tensor([30.]), torch.tensor([40.])]; clip_grads(g, 0); assert g[0].item() == 30.
    ref = [torch.randn(7, 3), torch.randn(5)]; p = [torch.nn.Parameter(torch.zeros_like(t)) for t in ref]
    for q,t in zip(p, ref): q.grad = t.clone()
    assert clip_grads(ref, .5).item() == pytest.approx(torch.nn.utils.clip_grad_norm_(p, .5).item(), rel=1e-6)
    for q,t in zip(p, ref): assert torch.allclose(q.grad, t, rtol=1e-5)
    for bad in (math.inf, math.nan): assert not grad_norm([torch.tensor([1., bad])]).isfinite()

def test_what_decays():
    m = model90(); opt = make_optimizer(m, TrainConfig(weight_decay=.3))
    decay = {id(p) for g in opt.param_groups if g['weight_decay'] == .3 for p in g['params']}
    for n,p in m.params().items(): assert (id(p) in decay) == (p.ndim == 2 and n != 'embed')
    assert sum(len(g['params']) for g in opt.param_groups) == len(m.params())

# ---- resume -------------------------------------------------------------------------------------------------------

@pytest.fixture(scope='module')
def straight(text, tmp_path_factory):
    "A straight run with three micro-batches a step, and a checkpoint at every step"
    out = tmp_path_factory.mktemp('straight')/'run'
    c = TrainConfig(**SMALL | dict(grad_accum=3, save_every=1), data=text, out=str(out))
    quiet(c)
    return c

def test_the_best_is_kept(cfg, tmp_path, monkeypatch, capfd):
    "12 steps, looked at every 2, saved every 4, one checkpoint kept: the lowest loss is at 6, where nothing else is due"
    held = iter([5., 4., 3., 4., 3., 3.5]) # 10 is no lower than 6
    monkeypatch.setattr(T, 'evaluate', lambda model, batches: next(held))
    c = replace(cfg, eval_every=2, keep=1, keep_best=True)
    r = train(c, show='lines')
    assert list(checkpoints(c.out)) == [12, 6] and (r.best_step, r.best_val_loss, r.val_loss) == (6, 3., 3.5)
    assert 'lowest held-out loss' in (err := capfd.readouterr().err) and f'3.0000 at step 6, kept in {c.out}/checkpoints/step-00000006' in err
    at(c.out, tmp_path/'again', 6) # Its best is remembered; a better one takes its place, and the old one goes
    held = iter([4., 2., 2.5])
    r = train(again(c, out=str(tmp_path/'again')), show='nothing')
    assert list(checkpoints(r.out)) == [12, 10] and r.best_step == 10
    shutil.rmtree(shutil.copytree(c.out, tmp_path/'gone')/'checkpoints/step-00000006') # Deleted by hand: the next look counts as the best
    held = iter([9.])
    r = train(again(c, out=str(tmp_path/'gone'), steps=14), show='nothing')
    assert list(checkpoints(r.out)) == [14] and r.best_step == 14

@pytest.mark.parametrize('change', [dict(eval_tokens=50), dict(seq_len=8), dict(batch_size=1, grad_accum=2), dict(lr=.1)])
def test_the_best_is_measured_again_on_other_held_out_tokens(cfg, tmp_path, monkeypatch, capfd, change):
    "Losses of other tokens cannot be compared: with easier ones any later step would be the best, with harder ones none"
    monkeypatch.setattr(T, 'evaluate', lambda model, batches: looked.append(model.embed.sum().item()) or next(held))
    c = replace(cfg, keep_best=True, eval_every=12, eval_tokens=104) # A batch of one row or of two ends at 104
    held, looked, other = iter([3.]), [], 'eval_tokens' in change or 'seq_len' in change
    quiet(c)
    for n,(again_12, at_13) in enumerate(((8., 7.), (6., 7.))):
        at(c.out, tmp_path/f'{n}', 12)
        held, looked = iter([again_12, at_13] if other else [at_13]), looked[:1]
        r = train(again(c, out=str(tmp_path/f'{n}'), steps=13, **change), show='lines')
        assert ('other held-out tokens' in capfd.readouterr().err) == other and looked[:1] == looked[1:2] if other else len(looked) == 2
        assert (r.best_step, r.best_val_loss) == ((13, 7.) if n == 0 and other else (12, 6.) if other else (12, 3.))
    held = iter([0.])
    quiet(again(replace(c, keep_best=False), out=str(at(c.out, tmp_path/'plain', 12)), steps=13, **change))
    assert losses(tmp_path/'plain')[13]['loss'] == losses(r.out)[13]['loss'] # It went on with the weights of step 12

def test_keeping_the_best_changes_no_bit_and_survives_resume(cfg, tmp_path):
    a = quiet(replace(cfg, lr=.3, min_lr=.3, eval_every=3)) # So high a rate that the end is not the best
    b = quiet(replace(cfg, lr=.3, min_lr=.3, eval_every=3, keep_best=True, out=str(tmp_path/'b')))
    low = min((r for r in read_metrics(Path(b.out)/'metrics.jsonl') if 'val_loss' in r), key=lambda r: r['val_loss'])
    assert (b.best_step, b.best_val_loss) == (low['step'], low['val_loss']) and losses(a.out) == losses(b.out)
    same = lambda x, y: all((checkpoints(x)[12]/n).read_bytes() == (checkpoints(y)[12]/n).read_bytes() for n in ('model.safetensors', 'optimizer.safetensors'))
    assert same(a.out, b.out)
    c = quiet(again(replace(cfg, lr=.3, min_lr=.3, eval_every=3, keep_best=True), out=str(at(b.out, tmp_path/'c', 6))))
    assert digest(Path(c.out)/'checkpoints') == digest(Path(b.out)/'checkpoints') and (c.best_step, c.best_val_loss) == (b.best_step, b.best_val_loss)

def test_no_best_where_nobody_looks_for_it(cfg, monkeypatch):
    "With --no-keep-best an old low is not said to be the lowest"
    monkeypatch.setattr(T, 'evaluate', lambda model, batches: next(held))
    held = iter([5., 4., 3., 2., 1.])
    c = replace(cfg, keep_best=True, keep=1); quiet(c)
    r = quiet(again(c, keep_best=False, steps=20))
    assert (r.val_loss, r.best_step, r.best_val_loss) == (1., None, None) and list(checkpoints(c.out)) == [20]

def test_no_best_without_held_out_text(cfg, monkeypatch):
    with pytest.raises(UserError, match='--keep-best .* --eval-every'): replace(cfg, keep_best=True, eval_every=0)
    got = T.get_data
    monkeypatch.setattr(T, 'get_data', lambda *a: (lambda batches, held, info: (batches, [], info))(*got(*a)))
    with pytest.raises(UserError, match='--keep-best needs held-out text'): quiet(replace(cfg, keep_best=True))
    assert not Path(cfg.out).exists()

def test_same_recipe_same_bytes(straight, tmp_path):
    quiet(replace(straight, out=str(tmp_path/'b')))
    a, b = digest(Path(straight.out)/'checkpoints'), digest(tmp_path/'b/checkpoints')
    assert a == b and len(a) == 36 and losses(straight.out) == losses(tmp_path/'b')

@pytest.mark.parametrize('k', range(1, 12))
def test_resume_is_the_straight_run(straight, tmp_path, k):
    out = at(straight.out, tmp_path/'run', k)
    quiet(again(straight, out=str(out)))
    assert digest(out/'checkpoints') == digest(Path(straight.out)/'checkpoints') # Weights, moments, generator, position: every byte
    assert losses(out) == losses(straight.out) and len(read_metrics(out/'metrics.jsonl')) == 12 # 17 digits, no line twice

def test_resume_in_a_new_process_with_other_save_points(straight, tmp_path):
    out = at(straight.out, tmp_path/'run', 5)
    rc, err = finish(child(again(straight, out=str(out), save_every=5, batch_size=3, grad_accum=2)))
    assert rc == 0 and 'changed: --save-every 1 -> 5' in err
    want = losses(straight.out)
    for k,r in losses(out).items(): assert r['loss'] == pytest.approx(want[k]['loss'], rel=1e-5) # The same rows, cut differently
    out = at(straight.out, tmp_path/'run2', 7)
    assert finish(child(again(straight, out=str(out), save_every=2)))[0] == 0
    assert losses(out) == want
    for f in ('model', 'optimizer'): assert digest(out/'checkpoints/step-00000012')[f'{f}.safetensors'] == digest(Path(straight.out)/'checkpoints/step-00000012')[f'{f}.safetensors']

def test_the_logged_rate_is_the_schedule(straight):
    assert [r['lr'] for r in losses(straight.out).values()] == [lr_at(i, straight) for i in range(12)]

def test_ten_of_twenty(cfg, tmp_path):
    long = replace(cfg, steps=8, save_every=0)
    quiet(long)
    short = replace(long, out=str(tmp_path/'b'), steps=4, decay_steps=8)
    quiet(short); quiet(again(short, steps=8))
    assert {k: r['loss'] for k,r in losses(long.out).items()} == {k: r['loss'] for k,r in losses(tmp_path/'b').items()}

def test_killed_anywhere_then_resumed(straight, tmp_path):
    c = replace(straight, out=str(tmp_path/'run'))
    patch = 'import time; old = C.write_safetensors\ndef slow(*a): old(*a); time.sleep(.05)\nC.write_safetensors = slow'
    for i,wait in enumerate((.3, .55)):
        p = child(again(c) if i else c, patch)
        while not (Path(c.out)/'checkpoints').exists(): time.sleep(.02); assert p.poll() is None
        time.sleep(wait); p.kill(); p.communicate()
    quiet(again(c))
    assert digest(tmp_path/'run/checkpoints') == digest(Path(straight.out)/'checkpoints') and losses(c.out) == losses(straight.out)

def test_looking_changes_nothing(cfg, tmp_path):
    quiet(cfg); quiet(replace(cfg, out=str(tmp_path/'b'), eval_every=1, sample_every=1, log_every=3, save_every=0))
    f = 'checkpoints/step-00000012/model.safetensors'
    assert digest(cfg.out)[f] == digest(tmp_path/'b')[f]
    rows = read_metrics(tmp_path/'b/metrics.jsonl')
    assert [r['step'] for r in rows] == list(range(1, 13)) and all('val_loss' in r and 'sample' in r for r in rows)

def test_recompute_changes_nothing(cfg, tmp_path):
    quiet(cfg); quiet(replace(cfg, out=str(tmp_path/'b'), recompute=True))
    assert losses(cfg.out) == losses(tmp_path/'b')

def test_bfloat16_keeps_float32_masters(cfg):
    quiet(replace(cfg, dtype='bfloat16', steps=4))
    d = Path(cfg.out)/'checkpoints/step-00000004'
    t = load_file(d/'model.safetensors') | load_file(d/'optimizer.safetensors')
    assert {v.dtype for v in t.values()} == {torch.float32}
    assert all((t[n] != 1).any() and not torch.equal(t[n], t[n].bfloat16().float()) for n in ('final_norm', 'blocks.0.q_norm')) # Gains moved, and by less than bfloat16 can say

# ---- a changed recipe --------------------------------------------------------------------------------------------------

def test_harmless_changes_are_applied_and_said(straight, tmp_path, capfd):
    out = at(straight.out, tmp_path/'run', 6)
    train(again(straight, out=str(out), lr=5e-3, steps=14, eval_every=7, seed=3), show='lines')
    err = capfd.readouterr().err
    for line in ('changed: --lr 0.01 -> 0.005', 'changed: --steps 12 -> 14', 'changed: --eval-every 4 -> 7', 'changed: --seed 0 -> 3 (the order of the data changes'): assert line in err
    assert 'changed: --dim' not in err and list(losses(out)) == list(range(1, 15))
    want = replace(straight, lr=5e-3, steps=14)
    assert [r['lr'] for r in losses(out).values()][6:] == [lr_at(i, want) for i in range(6, 14)]
    c = json.loads((out/'config.json').read_text())
    assert c['train']['lr'] == 5e-3 and c['history'] == [dict(step=6, lr=[.01, .005], steps=[12, 14], eval_every=[4, 7], seed=[0, 3])]

@pytest.mark.parametrize('kw, say', [(dict(dim=32), "--dim 32 differs from the run's 16"), (dict(n_layers=3), '--n-layers 3 .* 2'), (dict(n_kv_heads=1), '--kv-heads 1 .* 2'), (dict(head_dim=8), '--head-dim 8 .* 4'), (dict(ffn_dim=8), '--ffn-dim 8 .* 24'),
    (dict(rope_theta=5e5), '--rope-theta 500000.0 .* 10000.0'), (dict(eps=1e-5), '--eps'), (dict(tied=True), '--tied True .* False'), (dict(vocab_size=300), '--vocab-size 300 .* 280'), (dict(seq_len=17), "--seq-len 17 is more than the run's context of 16"), (dict(data='stories'), '--data stories')])
def test_other_architecture_or_data_is_refused(straight, tmp_path, kw, say):
    out = at(straight.out, tmp_path/'run', 12); was = digest(out)
    with pytest.raises(UserError, match=say): quiet(again(straight, out=str(out), **kw))
    assert digest(out) == was

def test_other_tokenizer_or_changed_file_is_refused(straight, text, tmp_path):
    out = at(straight.out, tmp_path/'run', 12)
    Tokenizer.train(['other text for other merges']*9, 270).save(tmp_path/'tokenizer.json')
    was = digest(out)
    with pytest.raises(UserError, match=r'--tokenizer .*tokenizer.json \(sha256 \w{8}…, 2\d\d ids\) differs from the run'): quiet(again(straight, out=str(out), tokenizer=str(tmp_path/'tokenizer.json')))
    mine = tmp_path/'tales.jsonl'; shutil.copy(text, mine)
    c = replace(straight, data=str(mine), out=str(tmp_path/'mine'), steps=2); quiet(c)
    mine.write_text(mine.read_text() + json.dumps(dict(text='one more'))+'\n')
    before = digest(c.out)
    with pytest.raises(UserError, match='--data .* is not what the run began with'): quiet(again(c, steps=3))
    assert digest(out) == was and digest(c.out) == before

def test_resume_alone_takes_the_saved_recipe(straight, tmp_path):
    out = at(straight.out, tmp_path/'run', 3)
    c = make_config(resume=out)
    assert replace(c, out='x', resume=False) == replace(straight, out='x')
    quiet(c)
    assert losses(out) == losses(straight.out)
    assert quiet(make_config(resume=out)).step == 12 # Nothing left to do is no error
    before = digest(out)
    with pytest.raises(UserError, match='--steps 5 is behind the run: .* is of step 12'): quiet(make_config(resume=out, steps=5))
    assert digest(out) == before

def test_a_damaged_newest_checkpoint_costs_only_its_steps(straight, tmp_path, capfd):
    out = at(straight.out, tmp_path/'run', 9)
    f = out/'checkpoints/step-00000009/optimizer.safetensors'; f.write_bytes(f.read_bytes()[:-100])
    train(again(straight, out=str(out)), show='lines')
    assert 'step-00000009: optimizer.safetensors has' in capfd.readouterr().err
    assert digest(out/'checkpoints') == digest(Path(straight.out)/'checkpoints') and losses(out) == losses(straight.out)

def test_foreign_weights_become_a_run(cfg, tmp_path):
    tok = Tokenizer.train(['the cat saw a dog'], 270)
    m = TinyTransformer(cfg.model_config(270), seed=5)
    new_run(tmp_path/'imported', m.cfg, m.params().__getitem__, tok)
    r = quiet(make_config(resume=tmp_path/'imported', data=cfg.data, steps=2, batch_size=2, device='cpu', lr=1e-3))
    a, b = load_file(tmp_path/'imported/checkpoints/step-00000000/model.safetensors'), load_file(tmp_path/'imported/checkpoints/step-00000002/model.safetensors')
    assert r.step == 2 and torch.equal(a['embed'], m.embed) and 0 < (a['blocks.0.wq']-b['blocks.0.wq']).abs().max() < 3e-3

def test_data_may_move(straight, text, tmp_path, capfd):
    "Contents count, not the path; and other contents are refused by their name"
    out = at(straight.out, tmp_path/'run', 8)
    there = shutil.copy(text, tmp_path)
    train(again(straight, out=str(out), data=there), show='lines')
    assert f'changed: --data {text} -> {there}' in capfd.readouterr().err
    assert digest(out/'checkpoints') == digest(Path(straight.out)/'checkpoints')
    with pytest.raises(UserError, match='gone.jsonl: no such file or directory; the run began with it, so say by --data where'): quiet(again(straight, out=str(out), data=str(tmp_path/'gone.jsonl')))

def test_imported_weights_that_are_gone(cfg, tmp_path):
    "A run that began with somebody's weights never begins anew with random ones"
    m = TinyTransformer(cfg.model_config(270), seed=5)
    run = new_run(tmp_path/'imported', m.cfg, m.params().__getitem__, Tokenizer.train(['the cat saw a dog'], 270), history=[dict(step=0, imported='hf')])
    shutil.rmtree(run/'checkpoints'); was = digest(run)
    with pytest.raises(UserError, match='began with imported weights, and none of its checkpoints is left'): quiet(make_config(resume=run, data=cfg.data, steps=2, device='cpu'))
    assert digest(run).items() >= was.items()

# ---- signals ------------------------------------------------------------------------------------------------------------

SLOW = 'import time; old = C.write_safetensors\ndef slow(*a): print("saving", flush=True); time.sleep(.4); old(*a)\nC.write_safetensors = slow'

@pytest.mark.parametrize('signals, rc', [([signal.SIGINT], 130), ([signal.SIGTERM, signal.SIGINT], 143)])
def test_signals_in_mid_save(straight, tmp_path, signals, rc):
    c = replace(straight, out=str(tmp_path/'run'))
    p = child(c, SLOW)
    assert p.stdout.readline() == 'saving\n'
    for s in signals: time.sleep(.1); p.send_signal(s)
    got, err = finish(p)
    done = max(checkpoints(c.out))
    assert got == rc and f'stopped at step {done} of 12, saved; go on with: xtrain train --resume --out {c.out}' in err and 'Traceback' not in err
    assert max(losses(c.out)) == done < 12 and not [n for n in os.listdir(tmp_path/'run/checkpoints') if n.startswith('.')]
    quiet(again(c))
    assert digest(tmp_path/'run/checkpoints') == digest(Path(straight.out)/'checkpoints')

def test_the_terminal_goes_away(straight, tmp_path):
    "A dropped ssh: SIGHUP, and a terminal that can be written to no more"
    import fcntl, pty, termios
    master, slave = pty.openpty()
    c = replace(straight, out=str(tmp_path/'run'))
    code = textwrap.dedent(CHILD).replace('{patch}', textwrap.dedent(SLOW))
    p = subprocess.Popen([sys.executable, '-W', 'ignore', '-c', code, json.dumps(asdict(c))], stdin=slave, stdout=subprocess.PIPE, stderr=slave, env=ENV,
                         start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0))
    os.close(slave)
    assert p.stdout.readline() == b'saving\n'
    os.close(master)
    p.communicate(timeout=120)
    assert p.returncode == 129 and 0 < max(checkpoints(c.out)) < 12
    quiet(again(c))
    assert digest(tmp_path/'run/checkpoints') == digest(Path(straight.out)/'checkpoints')

def test_the_reader_of_stderr_goes_away(straight, tmp_path):
    "Ctrl-C ends the `tee` of `xtrain train 2>&1 | tee log` too"
    c = replace(straight, out=str(tmp_path/'run'))
    p = child(c, SLOW + '\ntrain = (lambda f: lambda c, show: f(c, "bar"))(train)')
    assert p.stdout.readline() == 'saving\n'
    p.stderr.close(); p.send_signal(signal.SIGINT)
    assert p.wait(60) == 130 and 0 < max(checkpoints(c.out)) < 12
    with open('/dev/full', 'w') as full: p = subprocess.run([sys.executable, '-c', 'from xtrain.cli import main; main()', 'train', '--resume', '--out', c.out], stderr=full, env=ENV) # Nor is a full disk under the log a reason
    assert p.returncode == 0 and digest(tmp_path/'run/checkpoints') == digest(Path(straight.out)/'checkpoints')

def test_nohup_has_its_way(straight, tmp_path):
    c = replace(straight, out=str(tmp_path/'run'))
    p = child(c, SLOW, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    assert p.stdout.readline() == 'saving\n'
    p.send_signal(signal.SIGHUP)
    assert finish(p)[0] == 0 and max(checkpoints(c.out)) == 12

@pytest.mark.parametrize('when', [4, 12])
def test_what_is_due_is_done_though_somebody_stops(cfg, tmp_path, monkeypatch, when):
    "A look at held-out text that falls on the step of a Ctrl-C, or on the last one, would not come again"
    c, n, real = replace(cfg, eval_every=4, sample_every=4, keep_best=True, keep=1), 0, T.accumulate
    want = quiet(replace(c, out=str(tmp_path/'straight')))
    def told(*a):
        nonlocal n
        n += 1
        if n == when: os.kill(os.getpid(), signal.SIGINT)
        return real(*a)
    monkeypatch.setattr(T, 'accumulate', told)
    r = quiet(c)
    assert (r.step, r.exit_code) == (when, 130)
    r = quiet(again(c)) if when < 12 else r
    assert losses(c.out) == losses(want.out) and (r.best_step, r.best_val_loss) == (want.best_step, want.best_val_loss) and list(checkpoints(c.out)) == list(checkpoints(want.out))

# ---- faults ---------------------------------------------------------------------------------------------------------------

def test_a_wild_rate_stops_with_good_checkpoints(cfg):
    c = replace(cfg, lr=1e30, min_lr=0., warmup=0, steps=50, save_every=1, keep=2)
    with pytest.raises(UserError, match=r'step \d+: the gradient is not finite.*stopped with the weights of step \d+; the last checkpoint is of step \d+; try a lower --lr'): quiet(c)
    t = load_file(latest_checkpoint(c.out)/'model.safetensors')
    assert all(v.isfinite().all() for v in t.values())
    assert all(math.isfinite(r['loss']) for r in losses(c.out).values())

@pytest.mark.parametrize('log_every', [1, 5])
def test_one_bad_micro_batch_changes_nothing(straight, tmp_path, monkeypatch, log_every):
    c, calls, loss = replace(straight, out=str(tmp_path/'run'), save_every=0, log_every=log_every, eval_every=0), [], TinyTransformer.loss
    def bad(self, ids, t, reduction='mean'):
        calls.append(1)
        return loss(self, ids, t, reduction=reduction)*(math.nan if len(calls) == 3*6 + 2 else 1.) # The second of three, in step 7
    kept = {}
    monkeypatch.setattr(TinyTransformer, 'loss', bad)
    monkeypatch.setattr(T, 'make_optimizer', lambda m, cfg: kept.setdefault('opt', make_optimizer(kept.setdefault('model', m), cfg)))
    with pytest.raises(UserError, match=r'step 7: .*weights of step 6'): quiet(c)
    t = load_file(Path(straight.out)/'checkpoints/step-00000006/model.safetensors')
    assert all(torch.equal(t[n], p) for n,p in kept['model'].params().items())
    assert list(losses(c.out)) == [1, 2, 3, 4, 5, 6]

@pytest.mark.parametrize('line', [b'{"step": 9, "loss": 1.0, "sample": "caf\xc3', b'5\n', b'[1]\n', b'{"a": 1}\n', b'{"step": "x"}\n', b'\0\0\0\0'])
def test_a_damaged_line_of_metrics_is_left_out(straight, tmp_path, line):
    "Cut by a crash, in the middle of a character too: the run goes on, and can be exported"
    from xtrain.hf import open_weights
    out = at(straight.out, tmp_path/'run', 8)
    with open(out/'metrics.jsonl', 'ab') as f: f.write(line)
    assert open_weights(out).facts
    quiet(again(straight, out=str(out)))
    assert losses(out) == losses(straight.out)

def test_any_character_of_a_sample_comes_back(cfg, tmp_path):
    "A model that has learnt nothing says U+0085 and U+2028, where `splitlines` would part the line"
    log = T.Log(tmp_path/'m.jsonl', 0, 1, show='nothing')
    log.add(1, .1, torch.tensor(2.), torch.tensor(1.), 5); log.read(); log.write(sample=(said := 'a\x85b\u2028c\x0cd\x1ee')); log.close()
    T.Log(tmp_path/'m.jsonl', 1, 1, show='nothing').close() # As a resume does
    assert [r['sample'] for r in read_metrics(tmp_path/'m.jsonl')] == [said]

def test_a_sample_prompt_is_tried_first(cfg):
    with pytest.raises(UserError, match='--sample-prompt: .* lone surrogate'): quiet(replace(cfg, sample_every=4, sample_prompt='a\udcff'))
    assert not Path(cfg.out).exists()

def test_a_name_is_no_formula(cfg, tmp_path):
    r = quiet(replace(cfg, steps=2, out=str(tmp_path/r'$\foo$')))
    assert r.step == 2 and Path(r.out, 'loss.png').stat().st_size > 5000

def test_full_disk_in_mid_run(cfg):
    quiet(cfg); size = max(p.stat().st_size for p in Path(cfg.out).rglob('optimizer.safetensors'))
    was = digest(cfg.out)
    rc, err = finish(child(again(cfg, steps=20), limit=size//1024 - 1))
    assert rc == 1 and 'cannot write' in err and 'checkpoints/step-00000016' in err and 'errno 27' in err and 'Traceback' not in err
    now = digest(cfg.out)
    assert all(now[f] == h for f,h in was.items() if f.startswith('checkpoints')) and list(checkpoints(cfg.out)) == [12, 8, 4]
    assert quiet(again(cfg, steps=20)).step == 20

@pytest.mark.parametrize('source', ['', '/**/*.jsonl'])
def test_a_run_among_its_texts(cfg, tmp_path, source):
    "`--data . --out run`: the run's metrics.jsonl is none of the texts, now or when it goes on"
    (d := tmp_path/'texts').mkdir(); shutil.copy(cfg.data, d)
    c = replace(cfg, data=f'{d}{source}', out=str(d/'run'), steps=1)
    quiet(c)
    assert quiet(again(c, steps=2)).step == 2

def test_another_machine_is_said(cfg, monkeypatch, capfd):
    "Sums by other threads are added up in another order: the bits are others, and nobody should have to find out why"
    n = torch.get_num_threads()
    quiet(replace(cfg, steps=1))
    assert train(again(cfg, steps=2), show='lines') and 'last bits' not in capfd.readouterr().err
    monkeypatch.setattr(torch, 'get_num_threads', lambda: n+1)
    train(again(cfg, steps=3), show='lines')
    assert f'changed: threads {n} -> {n+1} (the last bits may differ from here on)' in capfd.readouterr().err

def test_no_picture_is_no_reason_to_stop(cfg, monkeypatch, capfd):
    def broken(*a): raise ImportError('numpy.core.multiarray failed to import')
    monkeypatch.setattr(T, 'plot_loss', broken)
    assert train(cfg, show='lines').step == 12 and 'no picture: numpy.core' in capfd.readouterr().err

def test_where_a_run_may_be(cfg, tmp_path):
    quiet(replace(cfg, steps=1))
    was = digest(cfg.out)
    with pytest.raises(UserError, match=f'holds a run already; go on with it by `xtrain train --resume --out {cfg.out}`'): quiet(cfg)
    assert digest(cfg.out) == was
    (tmp_path/'other').mkdir(); (tmp_path/'other/thesis.txt').write_text('')
    with pytest.raises(UserError, match='has other files in it'): quiet(replace(cfg, out=str(tmp_path/'other')))
    (odd := tmp_path/'my run').mkdir(); (odd/'config.json').write_text('{}')
    with pytest.raises(UserError, match="--resume --out '.*my run'`"): quiet(replace(cfg, out=str(odd))) # To be copied into a shell
    with pytest.raises(UserError, match='is a file'): quiet(replace(cfg, out=cfg.data))
    with pytest.raises(UserError, match='is not a run'): quiet(again(cfg, out=str(tmp_path/'none')))
    assert not (tmp_path/'none').exists()

def test_what_others_left_is_not_taken_for_a_stopped_run(cfg, tmp_path):
    "`--data data/books.txt --out .` would put tokens into the folder that the books lie in"
    (tmp_path/'p/data').mkdir(parents=True); (tmp_path/'q').mkdir()
    for f in ('p/data/books.txt', 'q/tokenizer.json'): (tmp_path/f).write_text(Path(cfg.data).read_text())
    was = digest(tmp_path)
    for out in 'pq':
        with pytest.raises(UserError, match='has other files in it'): quiet(replace(cfg, data=str(tmp_path/'p/data/books.txt'), out=str(tmp_path/out)))
    assert digest(tmp_path) == was
    quiet(replace(cfg, steps=1)); shutil.copytree(f'{cfg.out}/data', tmp_path/'r/data') # As if it had been killed behind its tokens
    assert quiet(replace(cfg, steps=1, out=str(tmp_path/'r'))).step == 1

@pytest.mark.parametrize('kw', [dict(dim=2**40), dict(n_layers=10**11), dict(head_dim=2**62), dict(vocab_size=10**14), dict(batch_size=2**62), dict(seq_len=2**40), dict(grad_accum=2**62)], ids=str)
def test_what_cannot_fit_is_refused_at_once(cfg, kw, monkeypatch):
    monkeypatch.setattr(T, 'get_tokenizer', lambda *a: pytest.fail('too late'))
    with pytest.raises(UserError, match=r'needs [\d,]+ GB at least, and this machine has \d+'): quiet(replace(cfg, **kw))
    assert not Path(cfg.out).exists()

def test_sources_are_looked_at_before_a_tokenizer_is_learnt(cfg, monkeypatch):
    monkeypatch.setattr(T, 'get_tokenizer', lambda *a: pytest.fail('too late'))
    for kw in (dict(data='no.txt'), dict(val_data='no.txt')):
        with pytest.raises(UserError, match='no.txt: no such file'): quiet(replace(cfg, **kw))
    with pytest.raises(UserError, match='--separator must be .* unset'): replace(cfg, separator='')

def test_a_file_that_is_no_txt_is_named(cfg, tmp_path, capfd):
    "A .json of rows would be read with its brackets and quotes: nothing is wrong with that if it is meant"
    for n in 'ab': (tmp_path/f'{n}.json').write_text(Path(cfg.data).read_text())
    for data, line in ((cfg.data, ''), ('a.json', 'a.json: read as plain text'), ('[ab].json', 'a.json and 1 more: read as plain text')):
        train(replace(cfg, data=str(tmp_path/data), out=str(tmp_path/'run'), steps=1), show='lines'); shutil.rmtree(tmp_path/'run')
        err = capfd.readouterr().err
        assert line in err and err.count('read as plain text') == bool(line)

def test_a_text_that_gives_a_smaller_tokenizer(cfg):
    said = []
    for n in (300, 50_000): T.get_tokenizer(replace(cfg, vocab_size=n), Path(cfg.out), said.append)
    assert said[0] == 'tokenizer: 300 ids, learnt from the data' and said[1].endswith('ids, learnt from the data, which give no more of the 50,000')

def test_a_tokenizer_is_learnt_from_the_beginning_of_a_large_file(cfg, tmp_path, monkeypatch):
    "A file without a separator is one document; it may be larger than memory"
    from xtrain import data as D
    from xtrain.tokenizer import Tokenizer
    big = tmp_path/'big.txt'; big.write_text('some words '*20_000)
    monkeypatch.setattr(D, 'CHUNK', 1000); monkeypatch.setattr(T, '_LEARN', {str(big): 5000})
    monkeypatch.setattr(Tokenizer, 'train', lambda texts, size: list(texts))
    with pytest.raises(AttributeError) as e: T.get_tokenizer(replace(cfg, data=str(big), tokenizer='train'), tmp_path, print)
    assert 5000 <= sum(map(len, e.value.obj)) < 10_000

def test_checkpoints_on_a_disk_that_is_gone(cfg, tmp_path):
    quiet(replace(cfg, steps=1))
    folder = Path(cfg.out)/'checkpoints'
    folder.rename(tmp_path/'disk'); folder.symlink_to(tmp_path/'disk')
    assert quiet(again(cfg, steps=2)).step == 2
    (tmp_path/'disk').rename(tmp_path/'away')
    with pytest.raises(UserError, match='checkpoints is a link to what is not there: .*disk'): quiet(again(cfg, steps=3))
    folder.unlink(); folder.write_text('')
    with pytest.raises(UserError, match='checkpoints is not a directory'): quiet(again(cfg, steps=3))

def test_unwritable_is_told_before_training(cfg, tmp_path, monkeypatch):
    monkeypatch.setattr(T, 'get_tokenizer', lambda *a: pytest.fail('too late'))
    places = [f'{cfg.data}/run', '/proc/run']
    if os.geteuid(): (tmp_path/'ro').mkdir(mode=0o555); places.append(str(tmp_path/'ro/run'))
    for out in places:
        with pytest.raises(UserError, match=f'cannot write {out}: .*errno'): quiet(replace(cfg, out=out))

def test_a_new_run_that_cannot_begin_leaves_nothing(cfg, tmp_path):
    for kw in (dict(seq_len=10**6), dict(data=str(tmp_path/'none.txt')), dict(tokenizer=str(tmp_path/'none.json')), dict(vocab_size=100)):
        with pytest.raises(UserError): quiet(replace(cfg, **kw))
        assert not Path(cfg.out).exists()

def test_two_processes_one_run(cfg):
    quiet(replace(cfg, steps=1))
    with T.locked(cfg.out):
        with pytest.raises(UserError, match='is being trained by another process'): quiet(again(cfg))

def test_no_gpu_is_said():
    if torch.cuda.is_available(): pytest.skip('there is one')
    with pytest.raises(UserError, match='--device cuda: (torch .* (built without CUDA|sees no GPU)|this machine has no NVIDIA driver)'): quiet(TrainConfig(device='cuda'))

# ---- what is written down ----------------------------------------------------------------------------------------------------

def test_metrics_picture_and_result(cfg, capfd):
    r = train(replace(cfg, data='stories:200', vocab_size=300, sample_every=6), show='lines')
    rows, err = read_metrics(Path(cfg.out)/'metrics.jsonl'), capfd.readouterr().err
    assert [x['step'] for x in rows] == list(range(1, 13))
    assert all(set(x) >= {'step', 'loss', 'lr', 'grad_norm', 'tokens', 'tokens_per_second'} for x in rows)
    assert [x['step'] for x in rows if 'val_loss' in x] == [4, 8, 12] and [x['step'] for x in rows if 'sample' in x] == [6, 12]
    assert rows[-1]['tokens'] == r.tokens == 12*2*16 and r.loss == rows[-1]['loss'] and r.val_loss == rows[-1]['val_loss']
    assert (Path(cfg.out)/'loss.png').read_bytes()[:4] == b'\x89PNG' and r.floor and f'{r.floor:.4f}' in err and 'held-out loss' in err
    assert r.exit_code == 0 and json.loads(json.dumps(r.to_dict()))['step'] == 12
    c = json.loads((Path(cfg.out)/'config.json').read_text())
    assert set(c) == {'model', 'train', 'data', 'history', 'machine'} and c['model']['vocab_size'] == 300 and 'out' not in c['train']

def test_speed_is_of_training_alone(cfg, monkeypatch):
    monkeypatch.setattr(T, 'evaluate', lambda *a: time.sleep(.2) or 1.)
    r = quiet(replace(cfg, eval_every=1))
    assert r.seconds > 2.4 and r.tokens/r.tokens_per_second < r.seconds - 2.3

def test_a_run_moves(straight, tmp_path):
    "A run directory may be renamed; nothing in it knows its place"
    shutil.copytree(straight.out, tmp_path/'elsewhere')
    assert str(straight.out) not in ''.join(p.read_text() for p in (tmp_path/'elsewhere').glob('*.json*'))

# ---- golden --------------------------------------------------------------------------------------------------------------------

GOLDEN = [4.497036457061768, 4.399097919464111, 4.267186641693115, 4.275496482849121, 4.318103790283203, 4.215892791748047, 4.047651767730713, 3.7522330284118652]

def test_golden_losses():
    "A change that should change nothing must change no digit (six of them, across machines)"
    m = TinyTransformer(ModelConfig(90, 32, 2, 4, 2, 8, 48, 64), seed=0)
    c = TrainConfig(lr=1e-2, warmup=2, steps=8, clip=.5)
    opt, got = make_optimizer(m, c), []
    for step in range(8):
        ids = (torch.arange(2*17).view(2, 17)*7 + step) % 90
        for g in opt.param_groups: g['lr'] = lr_at(step, c)
        got.append(accumulate(m, ids[:, :-1], ids[:, 1:], 1).item())
        clip_grads([p.grad for p in m.parameters()], c.clip); opt.step(); opt.zero_grad()
    assert got == pytest.approx(GOLDEN, rel=1e-5), got
