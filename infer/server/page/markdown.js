// Markdown: CommonMark's, and tables.

import { blockNode, blocks } from "./blocks.js";
import { coloured } from "./colours.js";
import { el } from "./dom.js";

/** Markdown that grows, in an element. Blocks that are as they were stay: a selection in them lasts. */
export class Markdown {
  constructor() {
    this.node = el("div", { className: "md" });
    this.shown = []; // of each block: its source, and its node
  }

  show(source) {
    const lines = source.replaceAll("\r\n", "\n").split("\n");
    let index = 0;
    for (const block of blocks(lines, 0)) {
      const raw = lines.slice(block.from, block.to).join("\n");
      const old = this.shown[index];
      if (old?.raw !== raw) {
        if (old?.kind === "code" && block.kind === "code" && old.language === block.language) {
          old.node.querySelector("code").replaceChildren(...coloured(block.text, block.language, block.isOpen));
          old.raw = raw;
        } else {
          const node = blockNode(block, 0);
          if (old) old.node.replaceWith(node);
          else this.node.append(node);
          this.shown[index] = { raw, kind: block.kind, language: block.language, node };
        }
      }
      index++;
    }
    for (const { node } of this.shown.splice(index)) node.remove();
  }

  /** The text that a screen reader says for a block. */
  said(index) {
    const { kind, node } = this.shown[index];
    return kind === "code" ? `${node.querySelector("pre").getAttribute("aria-label")}.` : node.textContent;
  }
}
