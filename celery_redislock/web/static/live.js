// Shows each new snapshot: loads this page again, and swaps its main part. Without this, the page works by reload.
"use strict";

const search = document.querySelector("input[type=search]");
let isLoading = false;

async function load(number) {
  const main = document.querySelector("main");
  if (isLoading || document.hidden || main.dataset.number === number || !getSelection().isCollapsed) return;
  isLoading = true;
  try {
    const answer = await fetch(location.href, { headers: { accept: "text/html" } });
    if (answer.redirected) return location.reload();
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const focused = main.contains(document.activeElement) && document.activeElement.getAttribute("href");
    main.replaceWith(page.querySelector("main"));
    if (focused) document.querySelector(`main a[href="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
  } catch {
    // The stream says when the page answers again.
  } finally {
    isLoading = false;
  }
}

// While no one looks at it, the page asks for nothing.
let stream = null;
function follow() {
  stream?.close();
  stream = document.hidden ? null : new EventSource("/live");
  if (!stream) return;
  stream.onmessage = (event) => load(event.data);
  stream.onerror = () => {
    document.querySelector(".seen").textContent = "The page's own process does not answer. What is below is old.";
    document.querySelector("main").dataset.number = "";
  };
}
document.addEventListener("visibilitychange", follow);
follow();

// The age goes on while no snapshot comes.
const loaded = new WeakMap();
setInterval(() => {
  const time = document.querySelector("time[data-age]");
  if (!time) return;
  if (!loaded.has(time)) loaded.set(time, performance.now());
  const seconds = Number(time.dataset.age) + (performance.now() - loaded.get(time)) / 1000;
  time.querySelector("b").textContent = seconds < 60 ? `${seconds.toFixed(1)}s` : `${Math.floor(seconds / 60)}m${String(Math.floor(seconds % 60)).padStart(2, "0")}s`;
}, 500);

document.addEventListener("keydown", (event) => {
  const isTyping = event.target.closest("input, textarea, select");
  if (event.key === "/" && !isTyping && !event.ctrlKey && !event.metaKey && !event.altKey) {
    event.preventDefault();
    search.focus();
    search.select();
  }
  if (event.key === "Escape" && isTyping) event.target.blur();
});
