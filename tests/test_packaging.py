"""The wheel and the source distribution, built from a copy of the checkout and tried in an environment of their own.

That environment holds the wheel and *only* what its metadata declares: the declared distributions, and theirs, are
linked into it from the development environment, so a dependency that was forgotten is missing there, and nothing
large is installed twice.
"""
import email, importlib.metadata as md, os, re, shutil, subprocess, sys, tarfile, venv, zipfile
from configparser import ConfigParser
from pathlib import Path
import pytest
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from notebooks import copy_project

ROOT = Path(__file__).resolve().parent.parent


def settings(root=ROOT):
    cp = ConfigParser(delimiters=['='])
    cp.read(root/'settings.ini', encoding='utf-8')
    return cp['DEFAULT']


def build(root, out):
    "sdist from the checkout, wheel from that sdist, with the build tools of this environment (no network)"
    r = subprocess.run([sys.executable, '-m', 'build', '--no-isolation', '--outdir', str(out), str(root)], capture_output=True, text=True)
    assert r.returncode == 0, r.stdout[-3000:] + r.stderr[-3000:]
    return next(out.glob('*.whl')), next(out.glob('*.tar.gz'))


@pytest.fixture(scope='module')
def built(tmp_path_factory):
    tmp = tmp_path_factory.mktemp('dist')
    return build(copy_project(ROOT, tmp/'checkout'), tmp/'out')


def metadata(whl):
    with zipfile.ZipFile(whl) as z: return z.read(next(n for n in z.namelist() if n.endswith('.dist-info/METADATA')))


# ---------------------------------------------------------------- what is in them

def test_metadata_is_valid(built):
    m = Metadata.from_email(metadata(built[0]), validate=True)
    s = settings()
    assert (m.name, str(m.version), m.summary) == ('xtrain', s['version'], s['description'])
    assert str(m.requires_python) == f'>={s["min_python"]}' and m.description_content_type == 'text/markdown'
    assert m.description.strip() == (ROOT/'README.md').read_text(encoding='utf-8').strip()
    assert 'Apache-2.0' in (m.license_expression or m.license) and m.license_files == ['LICENSE']
    assert sorted(m.provides_extra) == ['cuda', 'dev', 'gguf', 'hf', 'llamacpp', 'verify']


def test_metadata_names_nobody(built):
    "No home yet: a field that settings.ini leaves empty is absent, not an empty or made-up line"
    raw = email.message_from_bytes(metadata(built[0]))
    assert not [k for k,v in raw.items() if not str(v).strip()]
    assert {'Author-email', 'Home-page', 'Project-URL', 'Maintainer', 'Maintainer-email'}.isdisjoint(raw.keys())
    head = metadata(built[0]).decode().split('\n\n', 1)[0]
    assert '@' not in head and '://' not in head and 'example' not in head


def test_address_is_used_when_there_is_one(tmp_path):
    copy = copy_project(ROOT, tmp_path)
    s = copy/'settings.ini'
    s.write_text(re.sub(r'^git_url =$', 'git_url = https://example.org/%(user)s/%(repo)s', re.sub(r'^author_email =$', 'author_email = a@example.org', s.read_text(), flags=re.M), flags=re.M))
    code = 'from setuptools.build_meta import prepare_metadata_for_build_wheel as p; p("meta")'
    (copy/'meta').mkdir()
    r = subprocess.run([sys.executable, '-c', code], cwd=copy, capture_output=True, text=True)
    assert r.returncode == 0, r.stderr
    m = Metadata.from_email(next((copy/'meta').rglob('METADATA')).read_bytes(), validate=True)
    assert 'a@example.org' in m.author_email and m.home_page == 'https://example.org/xtrain/xtrain'


def test_requirements_are_those_of_settings(built):
    from shlex import split
    have, s = Metadata.from_email(metadata(built[0])).requires_dist, settings()
    extras = {k: k.removesuffix('_requirements') for k in s if k.endswith('_requirements')}
    assert {'dev', 'hf', 'verify', 'cuda', 'gguf', 'llamacpp'} <= set(extras.values())
    for key,extra in dict(extras, requirements=None).items():
        want = {canonicalize_name(Requirement(r).name) for r in split(s[key])}
        assert want == {canonicalize_name(r.name) for r in have if (r.marker is None) == (extra is None) and (not extra or r.marker.evaluate({'extra': extra}))}


def test_constraints_pin_what_we_ask_for():
    "Every requirement is pinned, each pin satisfies it, and what is installed here is the pin"
    from shlex import split
    pins = dict(re.findall(r'^([\w.-]+)==(\S+)$', (ROOT/'constraints.txt').read_text(), flags=re.M))
    pins = {canonicalize_name(k): v for k,v in pins.items()}
    assert {k for k in pins if k.startswith(('nvidia', 'cuda', 'triton'))} == {canonicalize_name(Requirement(r).name) for r in split(settings()['cuda_requirements'])} and all('+' not in v for v in pins.values())
    for key in [k for k in settings() if k.endswith('requirements')]:
        for r in map(Requirement, split(settings()[key])):
            assert r.specifier.contains(pins[canonicalize_name(r.name)]), r
    here = {canonicalize_name(d.name): d.version.split('+')[0] for d in md.distributions()}
    loose = [f'{n} {here[n]}, pinned {v}' for n,v in pins.items() if here.get(n, v) != v]
    if loose: pytest.skip('this environment was not made from constraints.txt: ' + '; '.join(loose[:4]))


def test_wheel_holds_the_package_and_no_more(built):
    with zipfile.ZipFile(built[0]) as z: names = set(z.namelist())
    files = {p.relative_to(ROOT).as_posix() for p in (ROOT/'xtrain').rglob('*.py')}
    kernels = {'xtrain/csrc/'+p.name for p in (ROOT/'csrc').iterdir() if p.suffix in ('.cu', '.cuh', '.cpp', '.h', '.md')}
    rest = {n for n in names if '.dist-info/' not in n}
    assert rest == files | kernels
    assert Path(built[0]).name.endswith('-py3-none-any.whl') and os.path.getsize(built[0]) < 2e6


def test_sdist_can_build_the_wheel(built):
    "The wheel above came out of it; what that needs and the licence are inside, and nothing that was made"
    with tarfile.open(built[1]) as t: names = {n.split('/', 1)[1] for n in t.getnames() if '/' in n}
    assert {'settings.ini', 'setup.py', 'pyproject.toml', 'README.md', 'LICENSE', 'MANIFEST.in', 'xtrain/__init__.py', 'csrc/README.md'} <= names
    assert not [n for n in names if n.startswith(('runs', 'docs', '.venv', 'build', '.git/'))]


# ---------------------------------------------------------------- do they work

def closure(reqs):
    "Installed distributions that `reqs` bring in, directly or not"
    todo, seen = [(Requirement(r), frozenset()) for r in reqs], {}
    while todo:
        r, _ = todo.pop()
        if r.marker and not r.marker.evaluate({'extra': ''}): continue
        key = (canonicalize_name(r.name), tuple(sorted(r.extras)))
        if key in seen: continue
        seen[key] = d = md.distribution(r.name)
        for q in map(Requirement, d.requires or []):
            if not q.marker or any(q.marker.evaluate({'extra': e}) for e in ('', *r.extras)):
                q.marker = None
                todo.append((q, frozenset()))
    return {d.metadata['Name']: d for d in seen.values()}


def link(dist, site):
    "Put an installed distribution into another environment without copying it"
    for top in {f.parts[0] for f in dist.files if f.parts[0] not in ('..', '__pycache__')}:
        src = Path(dist.locate_file(top))
        if src.exists() and not (site/top).exists(): os.symlink(src, site/top)


@pytest.fixture(scope='module')
def installed(built, tmp_path_factory):
    "`python` of an environment with the wheel and exactly its declared dependencies"
    env = tmp_path_factory.mktemp('wheel-env')
    venv.create(env, with_pip=False, symlinks=True)
    py = env/'bin'/'python'
    if not py.exists(): pytest.skip('links into an environment are made on Linux and macOS only')
    r = subprocess.run([sys.executable, '-m', 'pip', '--python', str(py), 'install', '-q', '--no-deps', '--no-index', '--disable-pip-version-check', str(built[0])], capture_output=True, text=True)
    assert r.returncode == 0, r.stderr
    site = Path(subprocess.run([py, '-c', 'import sysconfig; print(sysconfig.get_path("purelib"))'], capture_output=True, text=True, check=True).stdout.strip())
    for d in closure(str(r) for r in Metadata.from_email(metadata(built[0])).requires_dist if r.marker is None).values(): link(d, site)
    return py


def inside(py, *args, cwd, **kw):
    env = {k: v for k,v in os.environ.items() if k not in ('PYTHONPATH', 'PYTHONHOME', 'VIRTUAL_ENV')}
    return subprocess.run([str(py), *map(str, args)], cwd=cwd, env=dict(env, PATH=f'{py.parent}{os.pathsep}{env["PATH"]}'), capture_output=True, text=True, **kw)


def test_environment_is_really_its_own(installed, tmp_path):
    "It sees the wheel, not the checkout, and not what only developers have"
    r = inside(installed, '-c', 'import xtrain; print(xtrain.__file__)', cwd=tmp_path)
    assert str(installed.parent.parent) in r.stdout, r.stderr
    for pkg in ('nbdev', 'fastcore', 'pytest', 'transformers'):
        assert 'ModuleNotFoundError' in inside(installed, '-c', f'import {pkg}', cwd=tmp_path).stderr, pkg


def test_declared_dependencies_are_enough(installed, built, tmp_path):
    "Every module imports with what the metadata declares and nothing else"
    with zipfile.ZipFile(built[0]) as z: mods = [n[:-3].replace('/', '.').removesuffix('.__init__') for n in z.namelist() if n.endswith('.py')]
    code = 'import importlib, sys\nfor m in sys.argv[1:]:\n    mod = importlib.import_module(m)\n    [getattr(mod, n) for n in getattr(mod, "__all__", [])]\nprint(len(sys.argv)-1)'
    r = inside(installed, '-c', code, *mods, cwd=tmp_path)
    assert r.returncode == 0 and r.stdout.strip() == str(len(mods)), r.stderr


def test_the_command_works(installed, tmp_path):
    "Help, a tiny training run, its export and a few tokens, all from the wheel alone"
    x = installed.parent/'xtrain'
    def xtrain(*args):
        r = inside(installed, x, *args, cwd=tmp_path, timeout=200)
        assert r.returncode == 0, f'xtrain {" ".join(map(str, args))}\n{r.stdout}{r.stderr}'
        return r.stdout
    assert 'train' in xtrain('--help') and 'export' in xtrain('--help')
    (tmp_path/'text.txt').write_text('\n'.join(f'Once there were {n} hens, and {n+1} went home.' for n in range(400)))
    xtrain('train', '--data', 'text.txt', '--separator', '\\n', '--tokenizer', 'train', '--vocab-size', 300, '--dim', 16, '--n-layers', 1, '--n-heads', 2, '--kv-heads', 1, '--head-dim', 8, '--ffn-dim', 32,
           '--seq-len', 16, '--batch-size', 2, '--steps', 3, '--out', 'run')
    xtrain('export', 'run', 'hf')
    assert (tmp_path/'hf'/'model.safetensors').stat().st_size > 1000 and (tmp_path/'hf'/'config.json').exists()
    assert xtrain('generate', 'run', '--prompt', 'Once', '--max-tokens', 4).strip()
    assert xtrain('generate', 'hf', '--prompt', 'Once', '--max-tokens', 4).strip()


def test_help_needs_nothing_heavy(installed, tmp_path):
    "The command line answers without loading torch"
    r = inside(installed, '-X', 'importtime', installed.parent/'xtrain', '--help', cwd=tmp_path)
    assert r.returncode == 0
    heavy = {l.rsplit('|', 1)[1].strip() for l in r.stderr.splitlines() if '|' in l} & {'torch', 'transformers', 'matplotlib', 'pyarrow', 'datasets', 'tokenizers'}
    assert not heavy


# ---------------------------------------------------------------- make

def test_make_says_what_is_missing():
    "An old Python, or one without venv, is told in a sentence; the script itself is readable to old Pythons"
    import ast, make
    assert '3.9' in make.python_problem((3, 9, 1)) and 'PYTHON=' in make.python_problem((3, 9, 1))
    assert 'python3-venv' in make.python_problem((3, 12, 0), modules=['no_such_module'])
    assert make.python_problem((3, 11, 0), modules=['sys']) is None and make.python_problem((3, 14, 0), modules=['sys']) is None
    ast.parse((ROOT/'tools'/'make.py').read_text(), feature_version=(3, 6))


def test_environment_is_made_again_when_it_must(tmp_path, monkeypatch):
    "The installation is skipped only while nothing that decides it has changed"
    import make
    for f in ('settings.ini', 'pyproject.toml', 'setup.py', 'constraints.txt'): shutil.copy(ROOT/f, tmp_path)
    monkeypatch.setattr(make, 'ROOT', tmp_path)
    a = make.fingerprint('dev')
    assert a == make.fingerprint('dev') != make.fingerprint('verify')
    for f in ('settings.ini', 'constraints.txt'):
        (tmp_path/f).write_text((tmp_path/f).read_text()+'\n# changed\n')
        b = make.fingerprint('dev')
        assert a != b; a = b


def gpu_args(**kw):
    import argparse
    return argparse.Namespace(**dict(only='', write=None, wheels=None, chosen=False) | kw)


H200 = dict(torch='2.x', cuda='13.0', gpu='NVIDIA H200', n=1, sm='sm_90', need=[], nbdev=True, xdist=True, gb=139)


@pytest.fixture
def gpu_machine(monkeypatch, tmp_path):
    "make.gpu where torch sees what `seen` says and every command ends as `ends` says; nothing is installed"
    import make
    commands = []
    def run(cmd, what=None, check=True, **env):
        commands.append([str(c) for c in cmd])
        if '--gpu' in cmd: Path(cmd[cmd.index('--counts')+1]).write_text(run.notebooks)
        if 'tests/gpu' in cmd: next(Path(str(c).split('=')[1]) for c in cmd if 'junitxml' in str(c)).write_text('<testsuites><testsuite tests="9" failures="%d" errors="0" skipped="2"/></testsuites>' % run.failures)
        return run.code
    run.notebooks, run.failures, run.code = '3 0', 0, 0
    monkeypatch.setattr(make, 'run', run); monkeypatch.setattr(make, 'times', []); monkeypatch.setattr(make, 'ROOT', tmp_path)
    monkeypatch.setattr(make, 'setup', lambda *a: commands.append(['setup']))
    return make, run, commands


def test_make_gpu_counts_what_passed(gpu_machine, monkeypatch, capsys):
    make, run, commands = gpu_machine
    monkeypatch.setattr(make, 'probe', lambda py, path: H200 if py == sys.executable else None)
    make.gpu(gpu_args(write='here'))
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert sum('tests/gpu' in c and ('-n' in c) == (os.cpu_count() > 3) for c in commands) == 1
    assert re.fullmatch(r'3 notebooks, 7 tests passed, 2 skipped on NVIDIA H200 \(sm_90\), torch 2.x, in \d+ s', last)
    assert all(c[0] == sys.executable for c in commands) and not any('pip' in c for c in commands) and any(c[-2:] == ['--write', 'here'] for c in commands)
    run.code, run.notebooks, run.failures = 1, '2 1', 1
    with pytest.raises(SystemExit) as e: make.gpu(gpu_args())
    assert e.value.code == 1 and '2 notebooks, 6 tests passed, 2 failed, 2 skipped on' in capsys.readouterr().out


def test_make_gpu_without_nbdev_says_what_to_do(gpu_machine, monkeypatch, capsys):
    "The tests run all the same"
    make, run, commands = gpu_machine
    monkeypatch.setattr(make, 'probe', lambda py, path: dict(H200, nbdev=False))
    with pytest.raises(SystemExit): make.gpu(gpu_args())
    out = capsys.readouterr().out
    assert 'has no nbdev' in out and 'make gpu WHEELS=DIR' in out and '0 notebooks, 7 tests passed, 1 failed' in out


@pytest.mark.parametrize('driver', [False, True])
def test_make_gpu_without_a_gpu_is_one_line(gpu_machine, monkeypatch, driver):
    "Nothing is installed where there is no driver; exit status 1"
    make, run, commands = gpu_machine
    monkeypatch.setattr(make.shutil, 'which', lambda n: '/bin/x' if driver else None)
    monkeypatch.setattr(make.Path, 'exists', lambda p: False)
    monkeypatch.setattr(make, 'probe', lambda py, path: dict(torch='2.x', cuda=None, gpu=None, n=0, sm=None, need=[], nbdev=True))
    with pytest.raises(SystemExit) as e: make.gpu(gpu_args())
    assert str(e.value).startswith('make: gpu: no NVIDIA GPU to run on here (torch 2.x at ') and '\n' not in str(e.value) and commands == [['setup']]*driver


def test_wheels_are_pinned():
    "What a machine without a network is handed has its version in constraints.txt"
    import make
    pins = {canonicalize_name(l.split('==')[0]) for l in (ROOT/'constraints.txt').read_text().splitlines() if '==' in l}
    assert {canonicalize_name(n) for n in make.NBDEV} <= pins


def test_ci_runs_make_test():
    ci = ROOT/'.ci'/'run'
    assert os.access(ci, os.X_OK) and ci.read_text().startswith('#!/usr/bin/env bash\nset -euo pipefail\n') and ci.read_text().rstrip().endswith('make test')
    text = (ROOT/'Makefile').read_text()
    for target in ('loop', 'test', 'gpu', 'docs', 'setup', 'clean'): assert re.search(rf'^{target}:', text, re.M)
    assert (ROOT/'LICENSE').read_text().count('Apache License') >= 1 and len((ROOT/'LICENSE').read_text()) > 10000
