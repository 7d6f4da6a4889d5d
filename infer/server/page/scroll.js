// Scrolling: an answer is followed as long as its end is in sight.

import { $ } from "./dom.js";

const scroller = $("scroll");
export const atEnd = () => scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 40;
export const toEnd = () => { scroller.scrollTop = scroller.scrollHeight; };
const showDown = () => { $("down").hidden = atEnd(); };
scroller.addEventListener("scroll", showDown, { passive: true });
new ResizeObserver(showDown).observe($("thread"));
