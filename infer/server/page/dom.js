// The page is all that there is: no other script, nothing from elsewhere. What a model says becomes text
// nodes and elements made here, never markup.

export const $ = (id) => document.getElementById(id);

/** An element. `of` are its properties, or attributes where a name has a dash or is none of them. */
export function el(tag, of = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(of)) {
    if (name in node && name !== "role") node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

export function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const use = document.createElementNS("http://www.w3.org/2000/svg", "use");
  use.setAttribute("href", `#i-${name}`);
  svg.setAttribute("aria-hidden", "true");
  svg.append(use);
  return svg;
}

export const button = (text, className, onclick) =>
  el("button", { type: "button", className, onclick }, text);

export async function copied(from, text) {
  try {
    if (navigator.clipboard) await navigator.clipboard.writeText(text);
    else { // not over plain HTTP from another machine
      const field = el("textarea", { value: text, className: "hidden" });
      document.body.append(field);
      field.select();
      const done = document.execCommand("copy");
      field.remove();
      from.focus();
      if (!done) throw new Error();
    }
    from.textContent = "Copied";
  } catch {
    from.textContent = "Not copied";
  }
  setTimeout(() => { from.textContent = "Copy"; }, 1500);
}

/** Enter sends, unless it ends a word that an input method composes; with Shift it is a line end. */
export function onEnter(field, action) {
  field.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.keyCode === 229) return;
    event.preventDefault();
    action();
  });
}

export function grow(field) {
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight + field.offsetHeight - field.clientHeight}px`;
}

/** Have the browser save a text as a file. */
export function download(name, text) {
  const href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  el("a", { href, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(href), 10_000);
}
