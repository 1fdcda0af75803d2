// node site_page.js PAGE.md FOLDER CODE: loads the scripts of an interactive page, in its order,
// on a stub of a browser; then evaluates CODE and prints what it returns, as JSON.
// A script is looked for beside the page, in _static, and else in FOLDER.
"use strict";

const { existsSync, readFileSync } = require("fs");
const path = require("path");
const vm = require("vm");

class Element {
  constructor(namespaceURI, tag) {
    Object.assign(this, { namespaceURI, tagName: tag.toUpperCase(), attributes: {}, children: [] });
    Object.assign(this, { heard: {}, clientWidth: 700, scrollWidth: 700, scrollLeft: 0 });
  }
  setAttribute(name, value) { this.attributes[name] = String(value); }
  append(...parts) { this.children.push(...parts); }
  replaceChildren(...parts) { this.children = parts; }
  set textContent(text) { this.children = text === "" ? [] : [text]; }
  get textContent() { return this.children.map((part) => part.textContent ?? part).join(""); }
  addEventListener(kind, act) { (this.heard[kind] ??= []).push(act); }
  fire(kind, event = {}) {
    for (const act of this.heard[kind] || []) act({ target: this, preventDefault() {}, ...event });
  }
  focus() {}
  // All elements below this one that have a tag or a class of this name.
  all(name) {
    const below = this.children.filter((part) => part instanceof Element);
    const isOne = ({ tagName, attributes }) =>
      tagName === name.toUpperCase() || ` ${attributes.class} `.includes(` ${name} `);
    return below.flatMap((part) => [...(isOne(part) ? [part] : []), ...part.all(name)]);
  }
  texts(name) { return this.all(name).map((part) => part.textContent); }
}

const [page, folder, code] = process.argv.slice(2);
const source = readFileSync(page, "utf-8");
const HTML = "http://www.w3.org/1999/xhtml";
const root = new Element(HTML, "div");
const [, id] = source.match(/class="interactive" id="([\w-]+)"/);
globalThis.root = root;
globalThis.window = new Element("", "window");
globalThis.location = { hash: "", href: "" };
globalThis.history = {
  state: null,
  replaceState(state, _, address) {
    this.state = state;
    if (address) location.hash = address;
  },
};
Object.assign(window, { location, history, matchMedia: () => ({ matches: true }) });
globalThis.language = new Element(HTML, "a");  // leads to the page in the other language
globalThis.document = {
  getElementById: (wanted) => (wanted === id ? root : null),
  createElement: (tag) => new Element(HTML, tag),
  createElementNS: (space, tag) => new Element(space, tag),
  querySelector: () => null,
  querySelectorAll: (wanted) => (wanted === ".languages a" ? [language] : []),
};
globalThis.cancelAnimationFrame = () => {};
// The reader follows a link to another `hash` of the page.
globalThis.go = (hash) => {
  location.hash = hash;
  history.state = null;
  window.fire("hashchange");
};
for (const [, name] of source.matchAll(/<script[^>]* src="\.\.\/_static\/([^"]+)"/g)) {
  const own = path.join(path.dirname(page), "_static", name);
  const file = existsSync(own) ? own : path.join(folder, name);
  vm.runInThisContext(readFileSync(file, "utf-8"), file);
}
console.log(JSON.stringify(vm.runInThisContext(`(() => { ${code} })()`)));
