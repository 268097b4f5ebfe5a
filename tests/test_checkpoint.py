"Files and checkpoints: whole or not at all, valid by contents, exact when loaded."
import hashlib, json, math, os, pickle, subprocess, sys, textwrap
from pathlib import Path
import pytest, torch
from safetensors.torch import load_file, save_file
from xtrain.checkpoint import check_checkpoint, checkpoints, latest_checkpoint, load_checkpoint, load_run, new_run, read_config, save_checkpoint
from xtrain.config import ModelConfig, UserError
from xtrain.files import discard, locked, new_dir, open_safetensors, sweep, write_atomic
from xtrain.model import TinyTransformer
from xtrain.tokenizer import Tokenizer

CFG = dict(vocab_size=64, dim=16, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=6, ffn_dim=20, max_seq_len=32)
ENV = os.environ | dict(OMP_NUM_THREADS='1')

def python(code, *args, **kw):
    return subprocess.run([sys.executable, '-W', 'ignore', '-c', textwrap.dedent(code), *map(str, args)], capture_output=True, text=True, timeout=120, env=ENV, **kw)

def trained(seed=0, steps=2, **kw):
    "A model and optimizer that have seen a few batches"
    m = TinyTransformer(ModelConfig(**CFG | kw), seed=seed)
    opt = torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True)
    go_on(m, opt, 0, steps)
    return m, opt

def go_on(m, opt, start, stop):
    out = []
    for k in range(start, stop):
        ids = torch.randint(0, m.cfg.vocab_size, (2, 9), generator=torch.Generator().manual_seed(k))
        loss = m.loss(ids[:, :-1], ids[:, 1:]); loss.backward(); opt.step(); opt.zero_grad()
        out.append(loss.item())
    return out

def same(a, b): return all(torch.equal(p, q) and p.stride() == q.stride() for p,q in zip(a.parameters(), b.parameters()))
def hidden(d): return [n for n in os.listdir(d) if n.startswith('.')]
def digest(d): return {str(p.relative_to(d)): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(Path(d).rglob('*')) if p.is_file()}

# ---- files ---------------------------------------------------------------------------------------

KILLED = '''
    import builtins, os, sys, xtrain.files as F
    at, target, how = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    calls = []
    def maybe():
        if len(calls) == at: os.kill(os.getpid(), 9)
        calls.append(1)
    def counted(f):
        def g(*a, **k):
            maybe(); r = f(*a, **k)
            if f is real_open: maybe() # An open for writing has emptied the file
            return r
        return g
    real_open = builtins.open; builtins.open = counted(real_open)
    for n in ('open', 'mkdir', 'fsync', 'rename', 'replace', 'unlink', 'rmdir'): setattr(os, n, counted(getattr(os, n)))
    F._exchange = counted((lambda a, b: False) if how == 'two renames' else F._exchange)
    if os.path.isdir(target):
        with F.new_dir(target, overwrite=True) as p: [(p/n).write_text('new') for n in 'ab']
    else: F.write_atomic(target, 'new')
    print('finished')'''

@pytest.mark.parametrize('kind, how', [('file', ''), ('dir', 'exchange'), ('dir', 'two renames')])
def test_killed_before_each_system_call(tmp_path, kind, how):
    t, seen = tmp_path/'x', set()
    def write_old():
        if kind == 'file': write_atomic(t, 'old')
        else:
            with new_dir(t, overwrite=True) as p: [(p/n).write_text('old') for n in 'ab']
    for n in range(99):
        write_old()
        assert not hidden(tmp_path), 'the writer before should have swept'
        r = python(KILLED, n, t, how)
        if not t.exists(): assert how == 'two renames'; sweep(tmp_path)
        found = {t.read_text()} if kind == 'file' else {(t/n).read_text() for n in os.listdir(t)}
        assert found in ({'old'}, {'new'}) and (kind == 'file' or len(os.listdir(t)) == 2)
        seen |= found
        if 'finished' in r.stdout: break
    assert seen == {'old', 'new'} and 6 <= n < 40

def test_error_in_the_block_changes_nothing(tmp_path):
    d = tmp_path/'d'
    with new_dir(d) as p: (p/'a').write_text('1')
    with pytest.raises(ZeroDivisionError):
        with new_dir(d, overwrite=True) as p: (p/'b').write_text('2'); 1/0
    assert os.listdir(d) == ['a'] and not hidden(tmp_path)
    with pytest.raises(UserError, match='exists already'): new_dir(d).__enter__()
    (tmp_path/'empty').mkdir()
    with new_dir(tmp_path/'empty') as p: (p/'a').write_text('1')
    assert os.listdir(tmp_path/'empty') == ['a']
    with pytest.raises(ZeroDivisionError):
        with new_dir(tmp_path/'no/such/place'): 1/0
    with pytest.raises(ZeroDivisionError):
        with new_dir(tmp_path/('no/'*1200)): 1/0 # Deeper than Python's stack
    assert not (tmp_path/'no').exists()
    (tmp_path/'f').write_text('')
    with pytest.raises(UserError, match='is a file'): new_dir(tmp_path/'f', overwrite=True).__enter__()

def test_umask_links_and_long_names(tmp_path):
    was = os.umask(0o027)
    try:
        write_atomic(tmp_path/'f', 'x')
        with new_dir(tmp_path/'d') as p: (p/'a').write_text('1')
    finally: os.umask(was)
    assert os.stat(tmp_path/'f').st_mode & 0o777 == 0o640 and os.stat(tmp_path/'d').st_mode & 0o777 == 0o750
    os.symlink(tmp_path/'f', tmp_path/'link'); write_atomic(tmp_path/'link', 'y')
    assert os.path.islink(tmp_path/'link') and (tmp_path/'f').read_text() == 'y'
    write_atomic(tmp_path/('ü'*127), 'long')
    for deep in ('', 'no/such/'):
        with pytest.raises(UserError, match='too long'): write_atomic(tmp_path/deep/('x'*300), 'too long')
    assert not (tmp_path/'no').exists()
    dead = tmp_path/f'.{"x"*200}.00c0ffee.xtrain-tmp'; dead.touch(); write_atomic(tmp_path/('x'*250), '') # Its name was cut
    assert not hidden(tmp_path)

def test_living_writers_are_left_alone(tmp_path):
    with new_dir(tmp_path/'d') as p:
        sweep(tmp_path); assert p.exists()
    dead = tmp_path/'.d.00c0ffee.xtrain-tmp'; dead.mkdir(); (dead/'x').write_text('')
    (tmp_path/'.d.mine').write_text('a name of somebody else')
    with new_dir(tmp_path/'d', overwrite=True): pass
    assert hidden(tmp_path) == ['.d.mine']

def test_one_process_per_directory(tmp_path):
    with locked(tmp_path):
        r = python('import sys; from xtrain.files import locked\ntry: locked(sys.argv[1]).__enter__()\nexcept ValueError as e: print(e)', tmp_path)
        assert 'in use by another process' in r.stdout
    with locked(tmp_path): pass

def test_full_disk(tmp_path):
    write_atomic(tmp_path/'f', 'old')
    r = python('''
        import resource, sys, torch, safetensors.torch
        from xtrain.files import new_dir, write_atomic
        def save(d):
            with new_dir(d) as p: safetensors.torch.save_file({'w': torch.zeros(10**6)}, p/'w.safetensors')
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))
        for w in (lambda: write_atomic(sys.argv[1], b'x'*10**6), lambda: save(sys.argv[1]+'-dir')):
            try: w()
            except ValueError as e: print(e)''', tmp_path/'f')
    a, b = r.stdout.splitlines()
    assert f'{tmp_path}/f' in a and 'errno 27' in a and f'{tmp_path}/f-dir' in b and 'errno 27' in b
    assert (tmp_path/'f').read_text() == 'old' and os.listdir(tmp_path) == ['f']

# ---- what a checkpoint keeps -----------------------------------------------------------------------

@pytest.mark.parametrize('kw', [dict(), dict(tied=True), dict(n_kv_heads=4, head_dim=2)])
def test_round_trip_is_exact(tmp_path, kw):
    m, opt = trained(**kw)
    torch.manual_seed(5); torch.rand(3)
    p = save_checkpoint(tmp_path, 2, m, opt, dict(tokens=16, note='ü'))
    want_rng, want = torch.rand(2), go_on(m, opt, 2, 6)
    m2, opt2 = TinyTransformer(ModelConfig(**CFG | kw), seed=9), None
    opt2 = torch.optim.AdamW(m2.parameters(), lr=1e-2, fused=True)
    strides = [q.stride() for q in m2.parameters()]
    s = load_checkpoint(p, m2, opt2)
    assert s['state'] == dict(tokens=16, note='ü') and s['step'] == 2 and torch.equal(torch.rand(2), want_rng)
    assert strides == [q.stride() for q in m2.parameters()] and any(not q.is_contiguous() for q in m2.parameters())
    assert go_on(m2, opt2, 2, 6) == want and same(m, m2)
    for a,b in zip(m.parameters(), m2.parameters()):
        for k,v in opt.state[a].items(): assert torch.equal(v, opt2.state[b][k]) and v.stride() == opt2.state[b][k].stride()

def test_files_are_plain(tmp_path):
    m, opt = trained()
    p = save_checkpoint(tmp_path, 7, m, opt)
    assert p == tmp_path/'checkpoints/step-00000007' and sorted(os.listdir(p)) == ['model.safetensors', 'optimizer.safetensors', 'state.json']
    t, o, s = load_file(p/'model.safetensors'), load_file(p/'optimizer.safetensors'), json.loads((p/'state.json').read_text())
    assert {k: tuple(v.shape) for k,v in t.items()} == m.cfg.shapes() and all(torch.equal(t[n], q) for n,q in m.params().items())
    assert {v.dtype for v in [*t.values(), *o.values()]} == {torch.float32}
    assert set(o) == {f'{k}.{n}' for n in t for k in ('exp_avg', 'exp_avg_sq', 'step')}
    for n,f in s['files'].items(): assert f == dict(bytes=(p/n).stat().st_size, sha256=hashlib.sha256((p/n).read_bytes()).hexdigest())

def test_same_state_same_bytes(tmp_path):
    for d in 'ab': torch.manual_seed(0); save_checkpoint(tmp_path/d, 2, *trained())
    assert digest(tmp_path/'a') == digest(tmp_path/'b')

def test_without_moments(tmp_path):
    m, opt = trained()
    p = save_checkpoint(tmp_path, 0, m)
    m2, opt2 = trained(seed=1)
    load_checkpoint(p, m2, opt2)
    assert same(m, m2) and not opt2.state

# ---- strict ------------------------------------------------------------------------------------------

@pytest.mark.parametrize('change, say', [
    (lambda t: t.pop('blocks.1.wk'), '1 tensors are missing, the first is blocks.1.wk'),
    (lambda t: t.update(extra=torch.zeros(1)), '1 tensors are unknown, the first is extra'),
    (lambda t: t.update({'_orig_mod.embed': t.pop('embed')}), 'missing, the first is embed'),
    (lambda t: t.update(embed=t['embed'][:-1].clone()), r'embed is \(63, 16\) in the file, \(64, 16\) in the model'),
    (lambda t: t.update(final_norm=t['final_norm'].bfloat16()), 'final_norm is BF16 in the file, float32 in the model'),
])
def test_load_is_strict_and_all_or_nothing(tmp_path, change, say):
    p = save_checkpoint(tmp_path, 2, *trained())
    t = load_file(p/'model.safetensors'); change(t); save_file(t, p/'model.safetensors'); reseal(p)
    m, opt = trained(seed=3)
    before = {n: q.detach().clone() for n,q in m.params().items()}
    with pytest.raises(UserError, match=say): load_checkpoint(p, m, opt)
    assert all(torch.equal(before[n], q) for n,q in m.params().items())

def test_moments_are_strict_too(tmp_path):
    p = save_checkpoint(tmp_path, 2, *trained())
    t = load_file(p/'optimizer.safetensors'); t.pop('exp_avg.blocks.0.wo'); save_file(t, p/'optimizer.safetensors'); reseal(p)
    m, opt = trained(seed=3); before = m.embed.detach().clone()
    with pytest.raises(UserError, match='exp_avg.blocks.0.wo'): load_checkpoint(p, m, opt)
    assert torch.equal(m.embed, before)

def reseal(p):
    "Make the hashes fit again"
    s = json.loads((p/'state.json').read_text()); s.pop('sha256')
    for n in s['files']: s['files'][n] = dict(bytes=(p/n).stat().st_size, sha256=hashlib.sha256((p/n).read_bytes()).hexdigest())
    (p/'state.json').write_text(json.dumps(s | dict(sha256=hashlib.sha256(json.dumps(s, sort_keys=True).encode()).hexdigest())))

# ---- which one is valid ---------------------------------------------------------------------------------

def cut(f): f.write_bytes(f.read_bytes()[:-2])
def flip(f): b = bytearray(f.read_bytes()); b[len(b)//2] ^= 4; f.write_bytes(b)
def zeros(f): f.write_bytes(bytes(f.stat().st_size))
def empty(f): f.write_bytes(b'')
def no_step(f): s = json.loads(f.read_text()); s['step'] = 3; f.write_text(json.dumps(s))

@pytest.mark.parametrize('name', ['model.safetensors', 'optimizer.safetensors', 'state.json'])
@pytest.mark.parametrize('damage', [cut, flip, zeros, empty, Path.unlink, no_step])
def test_a_damaged_newest_is_passed_over(tmp_path, name, damage):
    if damage is no_step and name != 'state.json': pytest.skip('JSON only')
    m, opt = trained()
    for k in (8, 9, 10): save_checkpoint(tmp_path, k, m, opt, keep=0)
    damage(tmp_path/'checkpoints/step-00000010'/name)
    os.utime(tmp_path/'checkpoints/step-00000008', (4e9, 4e9)) # The oldest looks newest
    said = []
    assert latest_checkpoint(tmp_path, said.append).name == 'step-00000009'
    assert len(said) == 1 and 'step-00000010' in said[0] and name in said[0] and '\n' not in said[0]
    with pytest.raises(UserError, match=name): load_checkpoint(tmp_path/'checkpoints/step-00000010', m)

def test_none_or_none_whole(tmp_path):
    assert latest_checkpoint(tmp_path) is None
    (tmp_path/'checkpoints/step-00000001').mkdir(parents=True); (tmp_path/'checkpoints/step-x').mkdir(); (tmp_path/'checkpoints/.step-00000009.0badcafe.xtrain-tmp').mkdir()
    assert list(checkpoints(tmp_path)) == [1]
    with pytest.raises(UserError, match='none of its 1 checkpoints is whole.*state.json is missing'): latest_checkpoint(tmp_path, lambda s: None)
    (tmp_path/'checkpoints/step-00000002').mkdir(); (tmp_path/'checkpoints/step-00000002/state.json').write_text('{}'); said = []
    with pytest.raises(UserError, match='none of its 2 checkpoints is whole; the newest: state.json is damaged'): latest_checkpoint(tmp_path, said.append)
    assert len(said) == 1 and 'step-00000002: state.json is damaged; passed over for the one before' in said[0] # Before the last there is none

def test_numbers_not_names_decide(tmp_path):
    m, opt = trained()
    for k in (99_999_999, 100_000_000): save_checkpoint(tmp_path, k, m, opt)
    assert latest_checkpoint(tmp_path).name == 'step-100000000'

# ---- rotation -----------------------------------------------------------------------------------------

def test_keeps_the_newest(tmp_path):
    m, opt = trained()
    for k in range(1, 6): save_checkpoint(tmp_path, k, m, opt, keep=2)
    assert list(checkpoints(tmp_path)) == [5, 4] and not hidden(tmp_path/'checkpoints')

def test_keeps_one_more(tmp_path):
    m, opt = trained()
    for k in range(1, 6): save_checkpoint(tmp_path, k, m, opt, keep=2, best=2)
    assert list(checkpoints(tmp_path)) == [5, 4, 2]
    save_checkpoint(tmp_path, 6, m, opt, keep=2, best=5)
    assert list(checkpoints(tmp_path)) == [6, 5]

def test_never_deletes_the_last_good_one(tmp_path):
    m, opt = trained()
    for k in (1, 2, 3): save_checkpoint(tmp_path, k, m, opt, keep=0)
    for k in (2, 3): flip(tmp_path/f'checkpoints/step-{k:08d}/model.safetensors')
    save_checkpoint(tmp_path, 2, m, opt, keep=1) # The run went on from 1; 3 is damaged and of a future that is no more
    assert list(checkpoints(tmp_path)) == [2] and latest_checkpoint(tmp_path).name == 'step-00000002'

@pytest.mark.parametrize('where', ['weight', 'moment'])
@pytest.mark.parametrize('value', [math.nan, math.inf])
def test_not_finite_is_refused_and_the_good_ones_stay(tmp_path, where, value):
    m, opt = trained()
    for k in (1, 2): save_checkpoint(tmp_path, k, m, opt, keep=2)
    was = digest(tmp_path)
    with torch.no_grad(): (m.blocks[1].wo if where == 'weight' else opt.state[m.blocks[1].wo]['exp_avg'])[1, 1] = value
    with pytest.raises(UserError, match=r'step 3: .*blocks.1.wo is not finite'): save_checkpoint(tmp_path, 3, m, opt, keep=2)
    assert digest(tmp_path) == was

# ---- pickles --------------------------------------------------------------------------------------------

class Trap:
    def __init__(self, path): self.path = path
    def __reduce__(self): return os.mkdir, (str(self.path),)

@pytest.mark.parametrize('name', ['model.pt', 'optimizer.pt', 'pytorch_model.bin', 'model.safetensors'])
@pytest.mark.parametrize('form', ['pickle', 'zip'])
def test_pickles_are_never_opened(tmp_path, name, form):
    import io, zipfile
    data = pickle.dumps(Trap(tmp_path/'executed'))
    if form == 'zip':
        b = io.BytesIO()
        with zipfile.ZipFile(b, 'w') as z: z.writestr('archive/data.pkl', data)
        data = b.getvalue()
    d = tmp_path/'run/checkpoints/step-00000001'; d.mkdir(parents=True); (d/name).write_bytes(data)
    (tmp_path/'run/config.json').write_text(json.dumps(dict(model=CFG)))
    m, opt = trained()
    for f in (lambda: load_checkpoint(d, m, opt), lambda: load_checkpoint(d/name, m), lambda: load_run(tmp_path/'run'), lambda: open_safetensors(d/name).__enter__(), lambda: read_config(d/name)):
        with pytest.raises(UserError) as e: f()
        assert 'only safetensors is accepted' in str(e.value) or name == 'model.safetensors'
    with pytest.raises(UserError, match='only safetensors is accepted'): open_safetensors(d/name).__enter__()
    with pytest.raises(UserError, match='only safetensors is accepted|passed over|none of its'): latest_checkpoint(tmp_path/'run', lambda s: None)
    assert not (tmp_path/'executed').exists()

def test_the_package_has_no_unpickling():
    import re, xtrain
    for f in Path(xtrain.__file__).parent.rglob('*.py'):
        assert not re.search(r'torch\.load\(|pickle\.loads?\(|allow_pickle=True', f.read_text()), f

# ---- runs -------------------------------------------------------------------------------------------------

def test_load_run(tmp_path):
    tok = Tokenizer.train(['one two three'], 260)
    m, opt = trained(vocab_size=260)
    run = new_run(tmp_path/'run', m.cfg, m.params().__getitem__, tok, data=dict(eos_id=tok.eos_id))
    save_checkpoint(run, 5, trained(seed=2, vocab_size=260)[0])
    m0, t0, c = load_run(run, step=0)
    assert same(m, m0) and t0.sha256 == tok.sha256 and c['model'] == m.cfg.to_dict() and not same(m, load_run(run)[0])
    (run/'serving.json').write_text(json.dumps({'generation_config.json': dict(top_k=20)}))
    assert load_run(run)[1].serving == {'generation_config.json': dict(top_k=20)} # Its export says it again
    with pytest.raises(UserError, match=r'no checkpoint of step 3; there are \[5, 0\]'): load_run(run, step=3)
    with pytest.raises(UserError, match='is not a run'): load_run(tmp_path)
    with pytest.raises(UserError, match='exists already'): new_run(run, m.cfg, m.params().__getitem__, tok)
    for p in list(checkpoints(run).values()): discard(p)
    with pytest.raises(UserError, match='holds no checkpoint yet'): load_run(run)

def test_checkpoints_on_another_disk(tmp_path, monkeypatch):
    "`checkpoints` may be a link: the run is where the path says, not where the link leads"
    from xtrain.generate import chat_template
    from xtrain.hf import import_to_run, open_weights, run_of
    tok = Tokenizer.train(['one two three'], 260)
    tok.chat_template = 'hello'
    m, _ = trained(vocab_size=260)
    run = new_run(tmp_path/'run', m.cfg, m.params().__getitem__, tok)
    (run/'checkpoints').rename(tmp_path/'big'); (run/'checkpoints').symlink_to(tmp_path/'big')
    one = run/'checkpoints'/'step-00000000'
    assert same(m, load_run(run)[0]) and run_of(one) == (run, one) and chat_template(one)[0] == 'hello' and open_weights(one).tokenizer.sha256 == tok.sha256
    with pytest.raises(UserError, match='is what is to be imported'): import_to_run(one, run, True) # It would replace the run that it is of
    monkeypatch.chdir(run)
    assert run_of('checkpoints/step-00000000') == (run, one)
    (tmp_path/'latest').symlink_to(one)
    with pytest.raises(UserError, match='without its run'): open_weights(tmp_path/'latest') # Through two links nothing says which run it was

@pytest.mark.parametrize('key, v', [('model', 5), ('model', {}), ('train', 5), ('train', [1]), ('train', None), ('train', dict(steps='x')), ('data', 'x'), ('history', 5), ('history', [1])])
def test_a_damaged_config_is_said_in_a_line(tmp_path, key, v):
    from xtrain.hf import open_weights
    from xtrain.recipe import make_config
    tok = Tokenizer.train(['one two three'], 260)
    m, _ = trained(vocab_size=260)
    run = new_run(tmp_path/'run', m.cfg, m.params().__getitem__, tok)
    c = json.loads((run/'config.json').read_text()) | {key: v}
    (run/'config.json').write_text(json.dumps(c))
    for f in (open_weights, load_run, lambda r: make_config(resume=r, data='stories')):
        if f is load_run and key == 'train' and isinstance(v, dict): continue # A recipe is none of its business
        with pytest.raises(UserError, match='config.json'): f(run)

# ---- kill -9 ------------------------------------------------------------------------------------------------

KILLER = '''
    import json, os, random, signal, sys, time, torch
    sys.path.insert(0, sys.argv[2])
    from test_checkpoint import *
    run, rounds, rnd = sys.argv[1], 30, random.Random(0)
    trained() # Whatever torch imports on first use, before the forks
    def victim(start, pipe):
        m, opt = trained(steps=0)
        if start: load_checkpoint(latest_checkpoint(run), m, opt)
        for k in range(start, 10**6):
            go_on(m, opt, k, k+1)
            os.write(pipe, b'b'); save_checkpoint(run, k+1, m, opt, keep=2); os.write(pipe, b'e')
    newest = 0
    for i in range(rounds):
        r, w = os.pipe()
        pid = os.fork()
        if pid == 0:
            try: victim(newest, w)
            finally: os._exit(1)
        os.close(w); got = os.read(r, 1)
        assert got, 'the victim died by itself'
        while got.count(b'e') < 1 and rnd.random() < .5: got += os.read(r, 1)
        time.sleep(rnd.random()*.02)
        os.kill(pid, signal.SIGKILL); os.waitpid(pid, 0)
        got += os.read(r, 10**6); os.close(r)
        told, said = newest + got.count(b'e'), []
        path = latest_checkpoint(run, said.append)
        newest = json.loads((path/'state.json').read_text())['step'] if path else 0
        assert newest >= told and not said, (newest, told, said)
        assert not path or len(checkpoints(run)) <= 3 and len(hidden(run+'/checkpoints')) <= 3, os.listdir(run+'/checkpoints')
        print('mid-save' if got.endswith(b'b') else 'between', newest)
    m, opt = trained(steps=newest)
    m2, opt2 = trained(seed=1)
    load_checkpoint(latest_checkpoint(run), m2, opt2)
    assert same(m, m2), 'thirty lives should be one straight run'
    save_checkpoint(run, newest+1, m2, opt2); assert not hidden(run+'/checkpoints')
    print('done')'''

def test_kill_9_at_random_moments(tmp_path):
    r = python(KILLER, tmp_path/'run', Path(__file__).parent)
    lines = r.stdout.splitlines()
    assert lines and lines[-1] == 'done', r.stdout[-2000:] + r.stderr[-2000:]
    assert sum('mid-save' in l for l in lines) >= 10
