"""Build the site and the README from the notebooks: `python tools/docs.py build | check`

The notebooks go through nbdev's own processors (docments, `show_doc`, hidden cells), then through quarto if it is there,
else through smalldocs, which reads the same `_quarto.yml` and needs only Python. Mathematics is drawn by the copy of
KaTeX in tools/katex, so the site reads the same without a network. The output holds no dates and no absolute addresses.
"""
import argparse, ast, json, os, posixpath, re, shutil, subprocess, sys, tempfile
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

HERE = Path(__file__).resolve().parent
QUARTO = (1, 4)  # the oldest quarto whose `theme: {light, dark}` and lists of CSS files this uses
CDN = 'https://cdn.jsdelivr.net/npm/katex@0.16.11/dist'  # where both generators would load KaTeX from; never in the output


def tool():
    "Which generator: quarto if it is there, else smalldocs; DOCS=smalldocs takes the second anyway"
    if os.environ.get('DOCS') == 'smalldocs' or not shutil.which('quarto'): return 'smalldocs'
    said = subprocess.run(['quarto', '--version'], capture_output=True, text=True).stdout.strip()
    if tuple(int(o) for o in re.findall(r'\d+', said)[:2]) < QUARTO:
        sys.exit(f'quarto {said or "(no version)"} is too old, {".".join(map(str, QUARTO))} or newer is needed: update it, or run: make docs DOCS=smalldocs')
    return 'quarto'


# ---------------------------------------------------------------- staging

def symbols(root, stem):
    "Where each public name is documented: `{name: (page, anchor)}`, by its full and, if that is unique, its short name"
    d = ast.literal_eval((root/'xtrain'/'_modidx.py').read_text(encoding='utf-8').split('d = ', 1)[1])
    full, short = {}, {}
    for mod,names in d['syms'].items():
        for name,(where,_) in names.items():
            page,anchor = where.split('#')
            own = name.removeprefix(mod+'.')
            if own.startswith('_') or '._' in own or page not in stem: continue
            full[name] = (stem[page], anchor)
            short.setdefault(own, set()).add((stem[page], anchor))
    return full | {k: next(iter(v)) for k,v in short.items() if len(v) == 1}


def processors(names, page, shown):
    "nbdev's processors, but for three: cells run only for what `show_doc` needs, names link to pages of this site, no warning cell"
    from execnb.shell import CaptureShell
    from nbdev import processors as P

    class for_docs(P.Processor):
        "Run exported cells and imports, so that `show_doc` finds the names; committed outputs stay"
        def begin(self):
            self.k = CaptureShell()
            self.k.run('from nbdev.showdoc import show_doc')
        def run(self, cell, src):
            outs = self.k.run(src)
            if self.k.exc: raise RuntimeError(f'{page}, while preparing its page: {type(self.k.exc).__name__}: {self.k.exc}\n{src}') from self.k.exc
            return outs
        def cell(self, cell):
            if cell.cell_type != 'code' or not cell.source or cell.directives_.get('eval:', [''])[0].lower() == 'false': return
            trees = cell.parsed_() or []
            if P._show_docs(trees): cell.outputs = list(self.run(cell, cell.source))
            elif cell.directives_.keys() & {'export', 'exports', 'exporti', 'exec_doc'}: self.run(cell, cell.source)
            else:
                imports = [t for t in trees if isinstance(t, (ast.Import, ast.ImportFrom))]
                if imports: self.run(cell, '\n'.join(map(ast.unparse, imports)))

    class links(P.Processor):
        "Link names in backticks to where they are documented; drop nbdev's link to a repository there is not"
        name = re.compile(r'(?<![\[`])`([A-Za-z_][\w.]*)(\(\))?`(?![\]`])')
        def text(self, s):
            s = re.sub(r'^\[source\]\([^)]*\)\{[^}]*\}\n+', '', s, flags=re.M)
            out, fence = [], False
            for l in s.split('\n'):
                if l.lstrip().startswith(('```', '~~~')): fence = not fence
                out.append(l if fence or l.startswith(('#', '    ')) else self.name.sub(self.link, l))
            return '\n'.join(out)
        def link(self, m):
            where = names.get(m[1])
            if not where or where[0] == page: return m[0]
            return f'[`{m[1]}{m[2] or ""}`]({where[0]}.ipynb#{where[1]})'
        def cell(self, cell):
            if cell.cell_type == 'markdown': cell.source = self.text(cell.source)
            if re.match(r'(#\|.*\n)*show_doc\(', cell.source): shown.update(re.findall(r'show_doc\(([\w.]+)', cell.source))
            for o in cell.get('outputs', []):
                d = o.get('data') or {}
                if 'text/markdown' in d: d['text/markdown'] = self.text(''.join(d['text/markdown']))

    def hide_input(cell):
        "`#| hide_input` hides a figure's code and shows the figure"
        if cell.cell_type == 'code' and 'hide_input' in cell.directives_: cell.source = '#| echo: false\n' + cell.source

    swap = {'exec_show_docs': for_docs, 'add_links': links, 'insert_warning': None}
    procs = [swap.get(p.__name__, p) for p in P.FilterDefaults().base_procs()]
    return [p for p in procs if p] + [hide_input]


def stage(root, dest, generator='smalldocs'):
    "Write processed notebooks, `_quarto.yml` and what the pages use to `dest`, laid out as in the checkout; the notebooks"
    from execnb.nbio import read_nb, write_nb
    from nbdev.process import NBProcessor
    root, dest = Path(root).resolve(), Path(dest).resolve()
    back = os.getcwd()
    os.chdir(root)  # nbdev finds settings.ini from here
    sys.path.insert(0, str(root))
    try:
        files = sorted((root/'nbs').glob('*.ipynb'))
        stem = {re.sub(r'^\d+[a-zA-Z0-9]*_', '', p.stem.lower())+'.html': p.stem for p in files}
        names, shown, pages = symbols(root, stem), {}, {}
        for p in files:
            nb = read_nb(p)
            NBProcessor(nb=nb, procs=processors(names, p.stem, shown.setdefault(p.stem, set()))).process()
            for c in nb.cells:
                if c.cell_type == 'raw':  # the front matter nbdev made; the page is named like its notebook, the title gets its number
                    c.source = re.sub(r'^output-file: .*\n', '', c.source, flags=re.M)
                    if p.stem[:2].isdigit(): c.source = re.sub(r"^title: (['\"]?)", rf'title: \g<1>{p.stem[:2]} ', c.source, flags=re.M)
            pages[p.stem] = nb
    finally: os.chdir(back); sys.path.remove(str(root))
    anchors = {(page, n.lower()) for page,ns in shown.items() for n in ns}
    def landed(m): return m[0] if (m[1], m[2]) in anchors else f']({m[1]}.ipynb)'  # a name without a heading: link to its page
    (dest/'nbs').mkdir(parents=True, exist_ok=True)
    for name,nb in pages.items():
        for c in nb.cells:
            if c.cell_type == 'markdown': c.source = re.sub(r'\]\((\w+)\.ipynb#([\w.]+)\)', lambda m: landed(m) if m[2] in {a for _,a in names.values()} else m[0], c.source)
            for o in c.get('outputs', []):
                d = o.get('data') or {}
                if 'text/markdown' in d: d['text/markdown'] = re.sub(r'\]\((\w+)\.ipynb#([\w.]+)\)', landed, d['text/markdown'])
        write_nb(nb, dest/'nbs'/f'{name}.ipynb')
    config = (root/'_quarto.yml').read_text(encoding='utf-8')
    if generator == 'quarto': config = config.replace('    toc: true\n', f'    toc: true\n    html-math-method:\n      method: katex\n      url: {CDN}/\n', 1)
    (dest/'_quarto.yml').write_text(config, encoding='utf-8')
    for n in ('LOG.md', 'tools/site.css'):
        if (root/n).exists(): (dest/n).parent.mkdir(exist_ok=True); shutil.copy(root/n, dest/n)
    if (root/'nbs'/'images').is_dir(): shutil.copytree(root/'nbs'/'images', dest/'nbs'/'images', dirs_exist_ok=True)
    return pages


# ---------------------------------------------------------------- README

def readme(nb):
    "The staged index notebook as Markdown, with links that work from the top of the checkout"
    import yaml
    out = []
    def links(s):
        return re.sub(r'(\]\(|src=")(?!https?:|#|/|mailto:)([^)"\s]+)', lambda m: m[1]+posixpath.normpath('nbs/'+m[2]), s)
    for c in nb.cells:
        if c.cell_type == 'raw':
            fm = yaml.safe_load(c.source.strip().strip('-'))
            out.append(f'# {fm["title"]}\n\n> {fm["description"]}')
        elif c.cell_type == 'markdown': out.append(links(c.source.strip()))
        elif c.cell_type == 'code':
            opts,code = re.match(r'((?:#\|.*\n?)*)(.*)', c.source, re.S).groups()
            if 'echo: false' not in opts and code.strip(): out.append(f'```python\n{code.strip()}\n```')
            for o in c.get('outputs', []):
                d = o.get('data') or {}
                if 'text/markdown' in d: out.append(links(''.join(d['text/markdown']).strip()))
                elif any(k.startswith('image/') for k in d): sys.exit('index: a picture in an output cannot go into README.md; save it in nbs/images and link it')
                else:
                    text = ''.join(o.get('text') or d.get('text/plain') or '').rstrip()
                    if text: out.append('```text\n'+text+'\n```')
    return '\n\n'.join(out) + '\n'


# ---------------------------------------------------------------- building

def described(page):
    "The page with an `alt` for every picture that a cell drew: its caption, the line in italics below it, or else the heading it stands under"
    plain = lambda h: ' '.join(re.sub(r'<[^>]+>', '', h).replace('"', '&quot;').split())
    heads = [(m.start(), plain(m[2])) for m in re.finditer(r'<h([1-6])[^>]*>(.*?)</h\1>', page, re.S)]
    def add(m):
        head = next((h for at,h in reversed(heads) if at < m.start()), 'this page')
        return f'{m[1]} alt="{plain(m[4]) if m[4] else f"Picture to: {head}"}"{m[2]}{m[3] or ""}'
    return re.sub(r'(<img (?![^>]*\balt=)[^>]*?)(\s*/?>)((?:\s|</?(?:p|div|figure|span)\b[^>]*>)*<em>(.*?)</em></p>)?', add, page, flags=re.S)


def localise(site):
    "Take mathematics from the site's own KaTeX, and drop what would differ from build to build"
    lib = site/'site_libs'/'katex'
    shutil.copytree(HERE/'katex', lib, dirs_exist_ok=True)
    css = (lib/'katex.min.css').read_text(encoding='utf-8')  # only the woff2 fonts are here, and every browser reads them
    (lib/'katex.min.css').write_text(re.sub(r',url\(fonts/[\w-]+\.(?:woff|ttf)\) format\("\w+"\)', '', css), encoding='utf-8')
    icons = site/'site_libs'/'bootstrap-icons'
    if (icons/'fonts'/'bootstrap-icons.woff').exists():
        (icons/'fonts'/'bootstrap-icons.woff').unlink()
        f = icons/'bootstrap-icons.min.css'
        f.write_text(re.sub(r',\s*url\("?[^)]*\.woff(?:\?[^)]*)?"?\) format\("woff"\)', '', f.read_text(encoding='utf-8')), encoding='utf-8')
    for p in (site/'site_libs').rglob('*.css'):  # a theme's web fonts; the system's own stand next in its list
        s = p.read_text(encoding='utf-8')
        if '@import' in s: p.write_text(re.sub(r'@import\s+url\([^)]*\);?', '', s), encoding='utf-8')
    for p in sorted(site.rglob('*.html')):
        up = '../'*(len(p.relative_to(site).parts)-1)
        s = p.read_text(encoding='utf-8').replace(CDN, f'{up}site_libs/katex')
        s = re.sub(r'href="((?:\.\./|\./)+)"', r'href="\1index.html"', s)  # read from disk, a folder is a list of files
        p.write_text(described(s).rstrip('\n')+'\n', encoding='utf-8')
    js, index = site/'site_libs'/'smalldocs.js', site/'search.json'
    fetch = 'const r = await fetch(offset + "search.json");\n      index = await r.json();'
    if js.exists() and fetch in js.read_text(encoding='utf-8'):  # a page read from disk may not fetch, but may load a script
        load = ('await new Promise((ok, no) => { const s = document.createElement("script"); s.src = offset + "search.js"; s.onload = ok; s.onerror = no; '
                'document.head.append(s); });\n      index = window.searchIndex;')
        js.write_text(js.read_text(encoding='utf-8').replace(fetch, load), encoding='utf-8')
        (site/'search.js').write_text('window.searchIndex = '+index.read_text(encoding='utf-8')+';\n', encoding='utf-8')
        index.unlink()
    if not (site/'index.html').exists():
        (site/'index.html').write_text('<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>xtrain</title>\n'
            '<meta http-equiv="refresh" content="0; url=nbs/index.html"></head>\n<body><a href="nbs/index.html">xtrain</a></body></html>\n', encoding='utf-8')
    (site/'.nojekyll').touch()


def build(root, site, generator=None):
    "Build the site of the checkout `root` into the folder `site`; what README.md should be"
    generator = generator or tool()
    root, site = Path(root).resolve(), Path(site).resolve()
    with tempfile.TemporaryDirectory(prefix='xtrain-site-') as tmp:
        tmp = Path(tmp)
        pages = stage(root, tmp, generator)
        if generator == 'smalldocs':
            r = subprocess.run([sys.executable, '-m', 'smalldocs.cli', 'check', str(tmp)], capture_output=True, text=True)
            if r.returncode: sys.exit(f'smalldocs check:\n{r.stdout}{r.stderr}')
            cmd = [sys.executable, '-m', 'smalldocs.cli', 'render', '--quiet', '--strict', str(tmp)]
        else: cmd = ['quarto', 'render', str(tmp), '--no-execute', '--quiet']
        r = subprocess.run(cmd, capture_output=True, text=True)
        if r.returncode: sys.exit(f'{generator}:\n{r.stdout}{r.stderr}')
        shutil.rmtree(site, ignore_errors=True)
        shutil.copytree(tmp/'docs', site)
    localise(site)
    return readme(pages['index']), generator


# ---------------------------------------------------------------- checking

class Page(HTMLParser):
    "Links, ids and addresses of one page"
    def __init__(self, text):
        super().__init__(); self.refs, self.ids = [], set(); self.feed(text)
    def handle_starttag(self, tag, attrs):
        for k,v in attrs:
            if k in ('id', 'name') and v: self.ids.add(v)
            if k in ('href', 'src') and v: self.refs.append((tag, v))


def problems(site):
    "Every link or asset of the site that does not lead anywhere, and everything that would need a network or a place on this machine"
    site, bad = Path(site).resolve(), []
    pages = {p: Page(p.read_text(encoding='utf-8')) for p in sorted(site.rglob('*.html'))}
    for p,page in pages.items():
        name = p.relative_to(site).as_posix()
        for tag,ref in page.refs:
            u = urlsplit(ref)
            if ref.startswith(('data:', 'mailto:', 'javascript:')): continue
            if u.scheme or u.netloc:
                if tag in ('script', 'link', 'img', 'source', 'iframe'): bad.append(f'{name}: loads {ref[:80]} from the network')
                elif u.scheme not in ('http', 'https'): bad.append(f'{name}: link {ref[:80]}')
                continue
            if u.path.startswith('/'): bad.append(f'{name}: {ref[:80]} is not relative'); continue
            to = (p.parent/unquote(u.path)).resolve() if u.path else p
            if to.is_dir(): to = to/'index.html'
            if not to.is_file(): bad.append(f'{name}: {ref[:80]} is not there')
            elif u.fragment and to in pages and unquote(u.fragment) not in pages[to].ids: bad.append(f'{name}: {ref[:80]}: no such heading')
    for p in sorted(site.rglob('*.css')):
        for ref in re.findall(r'url\(["\']?([^"\')]+)', p.read_text(encoding='utf-8')):
            u = urlsplit(ref)
            if u.scheme in ('http', 'https') or u.netloc: bad.append(f'{p.relative_to(site).as_posix()}: loads {ref[:80]} from the network')
            elif not u.scheme and u.path and not (p.parent/unquote(u.path)).is_file(): bad.append(f'{p.relative_to(site).as_posix()}: {ref[:80]} is not there')
    return bad


def differences(a, b):
    "Files that differ between two folders"
    def read(d): return {p.relative_to(d).as_posix(): p.read_bytes() for p in sorted(Path(d).rglob('*')) if p.is_file()}
    x, y = read(a), read(b)
    return sorted(f for f in x.keys() | y.keys() if x.get(f) != y.get(f))


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('command', choices=['build', 'check'], help='build: write docs/ and README.md; check: say what is broken or out of date')
    p.add_argument('--root', type=Path, default=HERE.parent, help='the checkout')
    a = p.parse_args()
    docs, text = a.root/'docs', a.root/'README.md'
    with tempfile.TemporaryDirectory(prefix='xtrain-docs-') as tmp:
        md, generator = build(a.root, Path(tmp)/'site')
        bad = problems(Path(tmp)/'site')
        if bad: sys.exit('\n'.join(bad))
        if a.command == 'build':
            shutil.rmtree(docs, ignore_errors=True)
            shutil.copytree(Path(tmp)/'site', docs)
            text.write_text(md, encoding='utf-8')
            print(f'{generator}: {len(list(docs.rglob("*.html")))} pages in docs/, README.md from nbs/index.ipynb. Open docs/index.html')
        else:
            old = differences(docs, Path(tmp)/'site') + ([] if text.read_text(encoding='utf-8') == md else ['README.md'])
            if old: sys.exit(f'out of date, run make docs: {", ".join(old[:8])}')
            print('docs/ and README.md are what the notebooks make')


if __name__ == '__main__': main()
