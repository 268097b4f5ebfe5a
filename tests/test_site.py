"""The site: built from a copy of the checkout, whole, readable without a network, and the one that is committed."""
import json, os, re, subprocess, sys
from html.parser import HTMLParser
from pathlib import Path
import pytest
import docs
from notebooks import copy_project, notebooks

ROOT = Path(__file__).resolve().parent.parent
NBS = [p.stem for p in notebooks(ROOT)]


@pytest.fixture(scope='module')
def built(tmp_path_factory):
    "The site and the README of this checkout, made in a copy"
    tmp = tmp_path_factory.mktemp('site')
    copy = copy_project(ROOT, tmp/'checkout')
    code = ('import sys; sys.path.insert(0, "tools"); import docs; from pathlib import Path\n'
            'md, _ = docs.build(".", sys.argv[1], "smalldocs"); Path(sys.argv[2]).write_text(md, encoding="utf-8")')
    r = subprocess.run([sys.executable, '-c', code, str(tmp/'site'), str(tmp/'README.md')], cwd=copy, capture_output=True, text=True, timeout=240)
    assert r.returncode == 0, r.stdout[-3000:] + r.stderr[-3000:]
    return tmp/'site', (tmp/'README.md').read_text(encoding='utf-8')


def page(site, stem): return (site/'nbs'/f'{stem}.html').read_text(encoding='utf-8')


def test_every_notebook_is_a_page(built):
    assert {p.stem for p in (built[0]/'nbs').glob('*.html')} == set(NBS)
    assert (built[0]/'index.html').exists() and (built[0]/'LOG.html').exists()


def test_every_link_leads_somewhere(built):
    "Pages, headings, pictures, scripts, fonts: all there, all relative, none from the network"
    assert docs.problems(built[0]) == []


@pytest.mark.parametrize('text,why', [
    ('<a href="gone.html">x</a>', 'is not there'), ('<a href="#gone">x</a>', 'no such heading'), ('<a href="/nbs/index.html">x</a>', 'not relative'),
    ('<script src="https://cdn.example.org/a.js"></script>', 'from the network'), ('<img src="gone.png">', 'is not there'), ('<a href="file:/' '//etc/x">x</a>', 'link'),
    ('<link rel="stylesheet" href="//fonts.example.org/x.css">', 'from the network')])
def test_broken_links_are_found(tmp_path, text, why):
    (tmp_path/'a.html').write_text(f'<html><body id="b">{text}<a href="#b">fine</a><a href="https://arxiv.org/abs/1706.03762">fine</a></body></html>')
    found = docs.problems(tmp_path)
    assert len(found) == 1 and why in found[0]


def test_navigation_follows_the_course(built):
    "All notebooks, in teaching order, under their headings"
    nav = re.search(r'<nav id="quarto-sidebar".*?</nav>', page(built[0], 'index'), re.S)[0]
    links = [m for m in re.findall(r'href="([\w]+)\.html" class="sidebar-item-text', nav)]
    assert links[0] == 'index' and sorted(links) == sorted(NBS)
    assert [n[:2] for n in links[1:]] == sorted(n[:2] for n in links[1:]) and links.index('01_gradcheck') < links.index('01_contract')
    heads = [h for h in re.findall(r'<span class="menu-text">([^<]+)</span></a><a class="sidebar-item-toggle', nav)]
    assert heads == ['Start', 'Foundations', 'Model', 'Data and training', 'Out', 'Tools']


def test_mathematics_is_local(built):
    "Pages with formulas load KaTeX from beside them, and KaTeX has all its fonts"
    site, some = built[0], 0
    for p in sorted(site.rglob('*.html')):
        s = p.read_text(encoding='utf-8')
        if 'class="math' not in s: continue
        some += 1
        up = '../'*(len(p.relative_to(site).parts)-1)
        for f in ('katex.min.css', 'katex.min.js', 'contrib/auto-render.min.js'): assert f'"{up}site_libs/katex/{f}"' in s, p
    assert some > 5
    css = (site/'site_libs'/'katex'/'katex.min.css').read_text()
    fonts = set(re.findall(r'url\(fonts/([^)]+)\)', css))
    assert len(fonts) == 20 and fonts == {p.name for p in (site/'site_libs'/'katex'/'fonts').iterdir()}
    assert 'MIT' in (site/'site_libs'/'katex'/'LICENSE').read_text()


def test_every_picture_is_described(built):
    "Those that cells drew too: by their caption, and by their heading where there is none"
    pictures = [t for p in built[0].rglob('*.html') for t in re.findall(r'<img [^>]*>', p.read_text(encoding='utf-8'))]
    assert len(pictures) > 60 and [t[-80:] for t in pictures if not re.search(r'\balt="[^"]', t)] == []
    html = '<h2>On <code>x</code></h2><img src="a"/><p>no</p><h3>Two</h3><p><img src="b"></p>\n</div>\n<p><em>A "wave"</em></p><img src="c" alt="own">'
    assert re.findall(r'alt="([^"]*)"', docs.described(html)) == ['Picture to: On x', 'A &quot;wave&quot;', 'own']


def test_teaching_code_is_shown(built):
    "`#| exports` cells show their source under the signature"
    for stem in NBS:
        cells = json.loads((ROOT/'nbs'/f'{stem}.ipynb').read_text(encoding='utf-8'))['cells']
        n = sum(1 for c in cells if c['cell_type'] == 'code' and re.search(r'^#\|\s*exports\b', ''.join(c['source']), re.M))
        assert page(built[0], stem).count('Exported source') >= n, stem


def test_hidden_cells_stay_hidden(built):
    s = page(built[0], NBS[1])
    assert '#| ' not in re.sub(r'<[^>]+>', '', s) and 'default_exp' not in s and 'show_doc(' not in s


def test_no_page_holds_an_error(built):
    "No traceback, no address of our own making, no date, no path of this machine"
    for p in sorted((built[0]).rglob('*.html')):
        s = re.sub(r'base64,[A-Za-z0-9+/=]+', '', p.read_text(encoding='utf-8'))
        assert 'cell-output-error' not in s, p
        assert str(ROOT) not in s and '/tmp/' 'pytest' not in s and 'localhost' not in s, p
        assert not re.search(r'blob/main|github\.io|[\w.-]*example\.(?:com|org)', s), p


def test_search_works_from_disk(built):
    "The index is a script, since a page read from disk may not fetch"
    site = built[0]
    js = (site/'search.js').read_text(encoding='utf-8')
    index = json.loads(js.removeprefix('window.searchIndex = ').rstrip(';\n'))
    assert len({e['href'].split('#')[0] for e in index}) >= len(NBS)
    lib = (site/'site_libs'/'smalldocs.js').read_text(encoding='utf-8')
    assert 'search.js"' in lib and 'search.json' not in lib


def test_formulas_are_balanced():
    "Each formula opens and closes what it opens, so that it is not shown as red source"
    bad = []
    for stem in NBS:
        for n,c in enumerate(json.loads((ROOT/'nbs'/f'{stem}.ipynb').read_text(encoding='utf-8'))['cells'], 1):
            if c['cell_type'] != 'markdown': continue
            text = re.sub(r'```.*?```|`[^`\n]*`', '', ''.join(c['source']), flags=re.S)
            if text.count('$$') % 2: bad.append(f'{stem} cell {n}: $$ left open')
            for f in re.findall(r'\$\$(.+?)\$\$', text, re.S):
                braces = re.sub(r'\\[{}]', '', f)
                if braces.count('{') != braces.count('}'): bad.append(f'{stem} cell {n}: braces in {f[:40]!r}')
                if len(re.findall(r'\\left\b', f)) != len(re.findall(r'\\right\b', f)): bad.append(f'{stem} cell {n}: \\left and \\right in {f[:40]!r}')
                if sorted(re.findall(r'\\begin\{(\w+\*?)\}', f)) != sorted(re.findall(r'\\end\{(\w+\*?)\}', f)): bad.append(f'{stem} cell {n}: begin and end in {f[:40]!r}')
    assert bad == []


def test_readme_is_the_index(built):
    assert (ROOT/'README.md').read_text(encoding='utf-8') == built[1], 'README.md is out of date: make docs'


def test_readme_links_work(built):
    "From the top of the checkout, where it is read"
    for link in re.findall(r'\]\(([^)\s]+)\)', built[1]):
        if not link.startswith(('http', '#')): assert (ROOT/link.split('#')[0]).exists(), link


def test_committed_site_is_this_one(built):
    "docs/ is what the notebooks make now, byte for byte"
    if 'content="quarto' in (ROOT/'docs'/'nbs'/'index.html').read_text(encoding='utf-8'): pytest.skip('docs/ was made by quarto')
    assert docs.differences(ROOT/'docs', built[0]) == [], 'docs/ is out of date: make docs'


def test_site_is_not_heavy():
    if (ROOT/'docs').exists(): assert sum(p.stat().st_size for p in (ROOT/'docs').rglob('*') if p.is_file()) < 25e6


# ---------------------------------------------------------------- quarto or not

def fake(tmp_path, version):
    q = tmp_path/'bin'/'quarto'
    q.parent.mkdir(exist_ok=True)
    q.write_text(f'#!/bin/sh\necho {version}\n'); q.chmod(0o755)
    return f'{q.parent}{os.pathsep}{os.environ["PATH"]}'


def test_old_quarto_is_told_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv('PATH', fake(tmp_path, '1.2.335'))
    monkeypatch.delenv('DOCS', raising=False)
    with pytest.raises(SystemExit) as e: docs.tool()
    assert e.value.code.count('\n') == 0 and '1.2.335' in e.value.code and '1.4 or newer' in e.value.code and 'DOCS=smalldocs' in e.value.code


def test_which_generator(tmp_path, monkeypatch):
    monkeypatch.delenv('DOCS', raising=False)
    monkeypatch.setenv('PATH', str(tmp_path))
    assert docs.tool() == 'smalldocs'
    monkeypatch.setenv('PATH', fake(tmp_path, '1.6.40'))
    assert docs.tool() == 'quarto'
    monkeypatch.setenv('DOCS', 'smalldocs')
    assert docs.tool() == 'smalldocs'
