// Builds and updates the page. All text is set as textContent, so no text of the service or of a
// model is parsed as markup.

const SVG = "http://www.w3.org/2000/svg";

function build(node, properties, children) {
  for (const [name, value] of Object.entries(properties || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "text") node.textContent = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style")
      Object.entries(value).forEach(([key, each]) => node.style.setProperty(key, each));
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

export const h = (tag, properties, ...children) =>
  build(document.createElement(tag), properties, children);
export const svg = (tag, properties, ...children) =>
  build(document.createElementNS(SVG, tag), properties, children);
export const byId = (id) => document.getElementById(id);

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setAttribute(node, name, value) {
  if (value === null || value === false) node.removeAttribute(name);
  else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

export function setStyle(node, name, value) {
  if (node.style.getPropertyValue(name) !== value) node.style.setProperty(name, value);
}

// Gives `parent` one child for each item, in order. The child of an item that stays is kept, with
// its focus and selection. `create(item)` returns an element; `update(element, item)` shows the
// item in it.
export function keyed(parent, items, keyOf, create, update) {
  const known = parent.keyedChildren || (parent.keyedChildren = new Map());
  const wanted = new Map(items.map((item) => [String(keyOf(item)), item]));
  for (const [key, node] of known) {
    if (!wanted.has(key)) {
      node.remove();
      known.delete(key);
    }
  }
  let place = parent.firstElementChild;
  for (const [key, item] of wanted) {
    let node = known.get(key);
    if (!node) known.set(key, (node = create(item)));
    update(node, item);
    if (node === place) place = place.nextElementSibling;
    else parent.insertBefore(node, place);
  }
}
