// Formulas: from TeX to MathML, by Temml (vendor/temml.min.js). What an answer says is not trusted: Temml makes no
// links or images of it, and nothing is shown but MathML that can do nothing.

import { el } from "./dom.js";
import { on } from "./events.js";

const MATHML = "http://www.w3.org/1998/Math/MathML";
const ACTIVE = /^(?:on|href|xlink|src|id$|action)/i; // attributes
const MOST = 4000; // characters of a formula
const DEEPEST = 60; // elements in each other

const made = new Map(); // elements by their TeX: a paragraph that grows is made anew again and again

/** An element with a formula; null if Temml cannot read it. isDisplay: on a line of its own. */
export function mathNode(tex, isDisplay) {
  const key = `${isDisplay} ${tex}`;
  if (!made.has(key)) {
    if (made.size > 500) made.clear();
    made.set(key, newMath(tex, isDisplay));
  }
  return made.get(key)?.cloneNode(true) ?? null;
}

function newMath(tex, isDisplay) {
  if (tex.length > MOST) return null;
  const node = el("span", { className: "math" });
  const options = {
    displayMode: isDisplay, throwOnError: true, trust: false, maxExpand: 500,
    maxSize: [40, 400], // that of a page, in em and in points
    wrap: isDisplay || tex.length < 40 ? "none" : "tex", // a long one in a line may go on in the next
  };
  try { temml.render(tex, node, options); } catch { return null; }
  for (const number of node.querySelectorAll("span.tml-eqn")) number.remove(); // of an equation, still empty
  return isHarmless(node) ? node : null;
}

function isHarmless(node) {
  return depthOf(node) <= DEEPEST && [...node.querySelectorAll("*")].every((each) =>
    each.namespaceURI === MATHML && each.localName !== "annotation-xml" &&
    !each.getAttributeNames().some((name) => ACTIVE.test(name)));
}

/** How many elements are in each other. */
function depthOf(node) {
  let depth = 0;
  for (let level = [node]; level.length; depth++) level = level.flatMap((each) => [...each.children]);
  return depth;
}
