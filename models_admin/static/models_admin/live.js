/* Sections with data-live are fetched anew every data-every-s seconds, while somebody looks. */
"use strict";

function follow(section) {
  const everyMs = 1000 * Number(section.dataset.everyS);
  let shown = section.innerHTML;

  async function renew() {
    if (!document.hidden) {
      const answer = await fetch(section.dataset.live, { headers: { Accept: "text/html" } });
      // A redirect is the log-in page: there is nothing more to be had.
      if (answer.redirected || answer.status === 403 || answer.status === 404) return;
      if (answer.ok) show(await answer.text());
    }
    window.setTimeout(attempt, everyMs);
  }

  function show(text) {
    if (text === shown) return;
    shown = text;
    const focused = section.contains(document.activeElement)
      && document.activeElement.closest("[data-key]")?.dataset.key;
    const open = new Set([...section.querySelectorAll("details[open]")].map((d) => d.dataset.key));
    section.innerHTML = text;
    for (const details of section.querySelectorAll("details")) {
      details.open = open.has(details.dataset.key);
    }
    for (const kept of section.querySelectorAll("[data-key]")) {
      if (kept.dataset.key === focused) (kept.querySelector("summary") || kept).focus();
    }
  }

  // The server may be away for a moment: ask again.
  const attempt = () => renew().catch(() => window.setTimeout(attempt, everyMs));
  window.setTimeout(attempt, everyMs);
}

document.addEventListener("DOMContentLoaded", () => {
  document.querySelectorAll("[data-live]").forEach(follow);
});
