// Markdown to elements. No HTML is ever parsed: text stays text, and links lead to http, https and mailto only.

import { button, copy, el } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`\s]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?: +(.*)|$)/;
const TABLE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
// Code, link or image, bold, emphasis by star, by underscore, struck out, bare address, escaped sign.
const INLINE = new RegExp([
  "(?<tick>`+)(?<code>[^`]|[^`][\\s\\S]*?[^`])\\k<tick>(?!`)",
  "!?\\[(?<text>[^\\[\\]]*)\\]\\((?<url>[^\\s()]+(?:\\([^\\s()]*\\)[^\\s()]*)*)(?: +\"[^\"]*\")?\\)",
  "\\*\\*(?=\\S)(?<bold>[\\s\\S]*?\\S\\*?)\\*\\*|(?<!\\w)__(?=\\S)(?<strong>[\\s\\S]*?\\S)__(?!\\w)",
  "\\*(?![\\s*])(?<em>[\\s\\S]*?[^\\s*])\\*(?!\\*)",
  "(?<!\\w)_(?=\\S)(?<low>[\\s\\S]*?\\S)_(?!\\w)",
  "~~(?=\\S)(?<del>[\\s\\S]*?\\S)~~",
  "(?<bare>https?://[^\\s<>\"'`)\\]*]*[^\\s<>\"'`)\\]*.,;:!?])",
  "\\\\(?<sign>[\\\\`*_{}\\[\\]()#+.!~|>-])",
].join("|"), "g");
const DEEPEST = 8;

/** Return a fragment with a text's blocks. */
export function markdown(text) {
  const made = document.createDocumentFragment();
  blocks(text.replaceAll("\r\n", "\n").replaceAll("\t", "    ").split("\n"), made, 0);
  return made;
}

function begins(lines, at) {
  const line = lines[at];
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line) || isTable(lines, at);
}

function isTable(lines, at) {
  const next = lines[at + 1] ?? "";
  return lines[at].includes("|") && next.includes("-") && next.includes("|") && TABLE.test(next);
}

function blocks(lines, into, depth) {
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    const fence = FENCE.exec(line), heading = HEADING.exec(line);
    if (!line.trim()) at++;
    else if (fence) at = codeBlock(lines, at, fence, into);
    else if (heading) {
      into.append(inline(heading[2], el("h" + Math.min(heading[1].length + 2, 6))));
      at++;
    } else if (RULE.test(line)) {
      into.append(el("hr"));
      at++;
    } else if (QUOTE.test(line) && depth < DEEPEST) at = quote(lines, at, into, depth);
    else if (ITEM.test(line) && depth < DEEPEST) at = list(lines, at, into, depth);
    else if (isTable(lines, at)) at = table(lines, at, into);
    else at = paragraph(lines, at, into);
  }
}

function paragraph(lines, at, into) {
  const first = at;
  at++;
  while (at < lines.length && lines[at].trim() && !begins(lines, at)) at++;
  into.append(inline(lines.slice(first, at).map((line) => line.trim()).join("\n"), el("p")));
  return at;
}

/** A block of code. One whose end has not come yet goes to the end of the text. */
function codeBlock(lines, at, fence, into) {
  const end = new RegExp("^ {0,3}" + fence[1][0] + "{" + fence[1].length + ",}\\s*$"), first = ++at;
  while (at < lines.length && !end.test(lines[at])) at++;
  const text = lines.slice(first, at).join("\n");
  const copying = button("Copy", () => copy(text, copying), "Copy code");
  const head = el("div", { className: "code-head" }, el("span", { textContent: fence[2] || "text" }), copying);
  const code = el("pre", { tabIndex: 0 }, el("code", { textContent: text }));
  into.append(el("div", { className: "code" }, head, code));
  return at + 1;
}

function quote(lines, at, into, depth) {
  const inner = [];
  while (at < lines.length && QUOTE.test(lines[at])) inner.push(lines[at++].replace(QUOTE, ""));
  const made = el("blockquote");
  blocks(inner, made, depth + 1);
  into.append(made);
  return at;
}

const indentOf = (line) => line.length - line.trimStart().length;

function nextFilled(lines, at) {
  while (at < lines.length && !lines[at].trim()) at++;
  return at;
}

function list(lines, at, into, depth) {
  const [, space, mark] = ITEM.exec(lines[at]);
  const ordered = /\d/.test(mark), indent = space.length;
  const made = el(ordered ? "ol" : "ul");
  if (ordered) made.start = parseInt(mark, 10);
  while (at < lines.length) {
    const match = ITEM.exec(lines[at]);
    if (!match || match[1].length !== indent || /\d/.test(match[2]) !== ordered || RULE.test(lines[at])) break;
    const inner = [match[3] ?? ""];
    at = itemLines(lines, at + 1, indent, lines[at].length - inner[0].length, inner);
    const item = el("li");
    blocks(inner, item, depth + 1);
    // An item of one paragraph stands close to its neighbours.
    if (item.children.length && item.firstChild.tagName === "P") item.firstChild.replaceWith(...item.firstChild.childNodes);
    made.append(item);
    const next = nextFilled(lines, at), following = next < lines.length && ITEM.exec(lines[next]);
    if (following && following[1].length === indent) at = next;
  }
  into.append(made);
  return at;
}

/** Take an item's further lines: those indented deeper, blank ones between them, and a paragraph that runs on. */
function itemLines(lines, at, indent, width, inner) {
  while (at < lines.length) {
    const line = lines[at];
    if (!line.trim()) {
      const next = nextFilled(lines, at);
      if (next >= lines.length || indentOf(lines[next]) <= indent) break;
      inner.push("");
    } else if (indentOf(line) > indent) inner.push(line.slice(Math.min(indentOf(line), width)));
    else if (begins(lines, at)) break;
    else inner.push(line);
    at++;
  }
  return at;
}

const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());

function table(lines, at, into) {
  const row = (line, tag) => el("tr", {}, ...cells(line).map((cell) => inline(cell, el(tag))));
  const body = el("tbody"), head = el("thead", {}, row(lines[at], "th"));
  at += 2;
  while (at < lines.length && lines[at].includes("|")) body.append(row(lines[at++], "td"));
  into.append(el("div", { className: "scroll", tabIndex: 0 }, el("table", {}, head, body)));
  return at;
}

/** Append a text's inline elements to an element, and return it. */
function inline(text, into, depth = 0) {
  let last = 0;
  for (const match of text.matchAll(INLINE)) {
    plain(text.slice(last, match.index), into);
    into.append(element(match, depth));
    last = match.index + match[0].length;
  }
  plain(text.slice(last), into);
  return into;
}

function plain(text, into) {
  text.split("\n").forEach((line, number) => {
    if (number) into.append(el("br"));
    if (line) into.append(line);
  });
}

function element(match, depth) {
  const found = match.groups;
  if (found.code !== undefined) return el("code", { textContent: found.code.trim() || found.code });
  if (found.sign) return found.sign;
  if (found.bare) return link(found.bare, found.bare);
  if (found.url !== undefined) return link(found.url, found.text) ?? match[0];
  const kinds = { bold: "strong", strong: "strong", em: "em", low: "em", del: "del" };
  const kind = Object.keys(kinds).find((name) => found[name] !== undefined);
  return depth < DEEPEST ? inline(found[kind], el(kinds[kind]), depth + 1) : match[0];
}

/** Return a link, or null for an address of another kind. */
function link(url, text) {
  if (!/^(https?:\/\/|mailto:)/i.test(url)) return null;
  return el("a", { href: url, textContent: text || url, target: "_blank", rel: "noopener noreferrer" });
}
