/* Markdown as DOM nodes: headings, paragraphs, lists, quotations, code, tables, rules, links and emphasis.

   Nodes are elements with text in them, never HTML out of a string, so an answer cannot bring markup of its own.
   Text keeps its place: `leaf(from, to)` makes the nodes of that range of the source, in whatever colours.
   Line ends are kept, for `white-space: pre-wrap`. A star within a word is a star: answers compute 3*12. */
const MAX_DEPTH = 16;  // of quotations, lists and emphasis within each other; deeper ones are text
const FENCE = /^\s*(`{3,}|~{3,})\s*([^`\s]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+/;
const RULE = /^\s*([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+/;
const CELLS = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const INLINE = /\\[!-/:-@[-`{-~]|(`+)|\*{1,3}|__?|~~|\[|https?:\/\/[^\s<>()]+/g;
const MARKS = {"***": "strong", "**": "strong", "__": "strong", "*": "em", "_": "em", "~~": "del"};
const BESIDE_MARKS = /^$|[\s!-/:-@[-`{-~\p{P}]/u;  // what may stand outside of a mark

class Markdown {
  constructor(text, leaf) {
    this.text = text;
    this.leaf = leaf;
  }

  /** [{from, node}] of the blocks that begin at `from` or later. */
  blocks(from) {
    const lines = [];
    for (let start = from; start < this.text.length;) {
      const end = this.text.indexOf("\n", start);
      lines.push({from: start, to: end < 0 ? this.text.length : end});
      start = end < 0 ? this.text.length : end + 1;
    }
    return this.read(lines, 0);
  }

  said(line) {
    return this.text.slice(line.from, line.to);
  }

  read(lines, depth) {
    const found = [];
    for (let i = 0; i < lines.length;) {
      const said = this.said(lines[i]);
      if (!said.trim()) {
        i += 1;
        continue;
      }
      const kinds = depth > MAX_DEPTH ? [this.paragraph] : [
        this.fence, this.heading, this.rule, this.quote, this.list, this.table, this.paragraph,
      ];
      for (const kind of kinds) {
        const block = kind.call(this, lines, i, said, depth);
        if (block) {
          found.push({from: lines[i].from, node: block.node});
          i = block.next;
          break;
        }
      }
    }
    return found;
  }

  fence(lines, i, said) {
    const opened = FENCE.exec(said);
    if (!opened) return null;
    const pre = element("pre"), code = element("code");
    const closes = (line) => {
      const mark = this.said(line).trim();
      return mark.length >= opened[1].length && mark === opened[1][0].repeat(mark.length);
    };
    let next = i + 1;
    while (next < lines.length && !closes(lines[next])) next += 1;
    const held = lines.slice(i + 1, next);
    held.forEach((line, k) => code.append(...this.leaf(line.from, line.to + (k + 1 < held.length ? 1 : 0))));
    if (opened[2]) pre.dataset.language = opened[2];
    pre.append(code);
    return {node: pre, next: next + 1};
  }

  heading(lines, i, said, depth) {
    const mark = HEADING.exec(said);
    if (!mark) return null;
    const inner = {from: lines[i].from + mark[0].length, to: lines[i].to};
    return {node: element("h" + mark[1].length, this.inline([inner], depth)), next: i + 1};
  }

  rule(lines, i, said) {
    return RULE.test(said) ? {node: element("hr"), next: i + 1} : null;
  }

  quote(lines, i, said, depth) {
    const inner = [];
    for (let mark; i < lines.length && (mark = QUOTE.exec(this.said(lines[i]))); i += 1) {
      inner.push({from: lines[i].from + mark[0].length, to: lines[i].to});
    }
    if (!inner.length) return null;
    return {node: element("blockquote", this.read(inner, depth + 1).map((block) => block.node)), next: i};
  }

  /** Items of one kind; a line belongs to an item if it is indented further than its mark. */
  list(lines, i, said, depth) {
    const first = ITEM.exec(said);
    if (!first) return null;
    const ordered = first[2].length > 1, node = element(ordered ? "ol" : "ul");
    if (ordered) node.start = parseInt(first[2], 10);
    const indent = (line) => this.said(line).search(/\S|$/);
    const blank = (line) => !this.said(line).trim();
    const begins = (line) => {
      const mark = ITEM.exec(this.said(line));
      return mark && mark[2].length > 1 === ordered && mark[1].length <= first[1].length && !RULE.test(this.said(line));
    };
    while (i < lines.length && begins(lines[i])) {
      const mark = ITEM.exec(this.said(lines[i])), inner = [{from: lines[i].from + mark[0].length, to: lines[i].to}];
      for (i += 1; i < lines.length; i += 1) {
        const after = lines.slice(i).find((line) => !blank(line));
        if (!after || indent(after) <= mark[1].length) break;
        const cut = blank(lines[i]) ? 0 : Math.min(indent(lines[i]), mark[0].length);
        inner.push({from: lines[i].from + cut, to: lines[i].to});
      }
      node.append(element("li", this.read(inner, depth + 1).map((block) => block.node)));
      const after = lines.findIndex((line, k) => k >= i && !blank(line));
      if (after >= 0 && begins(lines[after])) i = after;
    }
    return {node, next: i};
  }

  table(lines, i, said, depth) {
    const rows = (line) => this.said(line).includes("|");
    if (!rows(lines[i]) || i + 1 >= lines.length || !rows(lines[i + 1]) || !CELLS.test(this.said(lines[i + 1]))) return null;
    const row = (line, tag) => element("tr", this.cells(line).map((cell) => element(tag, this.inline([cell], depth))));
    const body = element("tbody"), node = element("table", [element("thead", [row(lines[i], "th")]), body]);
    let next = i + 2;
    for (; next < lines.length && rows(lines[next]); next += 1) body.append(row(lines[next], "td"));
    return {node, next};
  }

  cells(line) {
    const said = this.said(line), found = [];
    let start = said.search(/\S/);
    if (said[start] === "|") start += 1;
    for (let place = start; place <= said.length; place += 1) {
      if (place < said.length && (said[place] !== "|" || said[place - 1] === "\\")) continue;
      const part = said.slice(start, place);
      if (place < said.length || part.trim()) {
        const from = line.from + start + (part.length - part.trimStart().length);
        found.push({from, to: Math.max(from, line.from + start + part.trimEnd().length)});
      }
      start = place + 1;
    }
    return found;
  }

  paragraph(lines, i, said, depth) {
    const begun = i;
    const ends = (k) => {
      const line = this.said(lines[k]);
      return !line.trim() || [FENCE, HEADING, RULE, QUOTE, ITEM].some((mark) => mark.test(line)) ||
        this.table(lines, k, line, MAX_DEPTH) !== null;
    };
    i += 1;
    while (i < lines.length && (depth > MAX_DEPTH || !ends(i))) i += 1;
    return {node: element("p", this.inline(lines.slice(begun, i), depth)), next: i};
  }

  /** Nodes of what these lines say. */
  inline(lines, depth) {
    const nodes = [];
    lines.forEach((line, k) => {
      nodes.push(...this.span(line.from, line.to, depth));
      if (k + 1 < lines.length) nodes.push(...this.leaf(line.to, line.to + 1));
    });
    return nodes;
  }

  /** Nodes of a range within one line. */
  span(from, to, depth) {
    const nodes = [], said = this.text.slice(from, to), missing = new Set();
    let plain = 0;
    const flush = (until) => nodes.push(...this.leaf(from + plain, from + until));
    const put = (node, begin, end) => {
      flush(begin);
      nodes.push(node);
      plain = INLINE.lastIndex = end;
    };
    INLINE.lastIndex = 0;
    for (let match; depth <= MAX_DEPTH && (match = INLINE.exec(said));) {
      const [mark] = match, place = match.index, inner = place + mark.length;
      let end = -1;
      if (mark[0] === "\\") {  // an escaped mark is itself
        flush(place);
        plain = place + 1;
      } else if (match[1]) {
        if (!missing.has(mark)) end = closing(said, mark, inner, () => true);
        if (end < 0) missing.add(mark);
        else put(element("code", this.leaf(from + inner, from + end)), place, end + mark.length);
      } else if (mark === "[") {
        const link = /^\[([^[\]]*)\]\(([^\s()<>]*)\)/.exec(said.slice(place, place + 2048));
        const node = link && anchor(link[2]);
        if (node) {
          node.append(...this.within(from + place + 1, from + place + 1 + link[1].length, depth));
          put(node, place, place + link[0].length);
        }
      } else if (mark.startsWith("http")) {
        const url = mark.replace(/[.,;:!?'"*_~\]]+$/, ""), node = anchor(url);
        if (node) {
          node.append(...this.leaf(from + place, from + place + url.length));
          put(node, place, place + url.length);
        }
      } else if (BESIDE_MARKS.test(said.slice(place - 1, place)) && /\S/.test(said[inner] ?? " ")) {
        const closes = (k) => /\S/.test(said[k - 1]) && BESIDE_MARKS.test(said[k + mark.length] ?? "");
        if (!missing.has(mark)) end = closing(said, mark, inner + 1, closes);
        if (end < 0) missing.add(mark);
        else put(element(MARKS[mark], this.within(from + inner, from + end, depth)), place, end + mark.length);
      }
    }
    flush(said.length);
    return nodes;
  }

  within(from, to, depth) {
    const place = INLINE.lastIndex, nodes = this.span(from, to, depth + 1);
    INLINE.lastIndex = place;
    return nodes;
  }
}

/** Where the mark closes what it opened: it stands alone, and where it may; -1: nowhere. */
function closing(said, mark, from, may) {
  for (let place = said.indexOf(mark, from); place >= 0; place = said.indexOf(mark, place)) {
    let length = 0;
    while (said[place + length] === mark[0]) length += 1;
    if (length === mark.length && may(place)) return place;
    place += length;
  }
  return -1;
}

function element(tag, nodes = []) {
  const made = document.createElement(tag);
  made.append(...nodes);
  return made;
}

/** A link to another page; null for any other scheme, which may be a script. */
function anchor(url) {
  if (!/^(https?:\/\/|mailto:)/i.test(url)) return null;
  const node = element("a");
  node.href = url;
  node.target = "_blank";
  node.rel = "noopener noreferrer";
  return node;
}
