"use strict";
(() => {
  const WORDS = { tensor: "TP", pipeline: "PP", data: "DP", context: "CP", expert: "EP" };
  let chosen = null;

  function degrees() {
    const box = document.querySelector(".dimensions");
    if (!box) return null;
    const read = (name) => Number(box.dataset[name]);
    return { tensor: read("tensor"), pipeline: read("pipeline"), data: read("data"), context: read("context"),
      expert: read("expert"), colors: read("colors") };
  }

  function coordinates(rank, d) {
    const tensor = rank % d.tensor;
    let rest = Math.floor(rank / d.tensor);
    const context = rest % d.context;
    rest = Math.floor(rest / d.context);
    const pipeline = rest % d.pipeline;
    const data = Math.floor(rest / d.pipeline);
    return { tensor, context, pipeline, data, expert: (data * d.context + context) % d.expert };
  }

  function recolor(key) {
    const d = degrees();
    if (!d) return;
    for (const cell of document.querySelectorAll(".cells .r[data-n]")) {
      const color = coordinates(Number(cell.dataset.n), d)[key] % d.colors;
      cell.className = cell.className.replace(/\bc\d+\b/, "c" + color);
    }
    const legend = document.querySelector(".key");
    legend.replaceChildren();
    for (let number = 0; number < Math.min(d[key], d.colors); number++) {
      const swatch = document.createElement("i");
      swatch.className = "r c" + number;
      swatch.textContent = number;
      legend.append(swatch);
    }
    const text = document.createElement("span");
    text.textContent = WORDS[key] + " coordinate" + (d[key] > d.colors ? ", colors repeat" : "");
    legend.append(text);
  }

  function describe(event) {
    const cell = event.target.closest ? event.target.closest(".r[data-n]") : null;
    const line = document.getElementById("pointed");
    const d = degrees();
    if (!cell || !line || !d) return;
    const rank = Number(cell.dataset.n);
    const at = coordinates(rank, d);
    const parts = Object.keys(WORDS).filter((key) => d[key] > 1).map((key) => WORDS[key] + " " + at[key]);
    line.textContent = "Rank " + rank + ": " + parts.join(", ");
  }

  function prepare() {
    for (const radio of document.querySelectorAll(".dimensions input")) {
      if (chosen && radio.value === chosen) radio.checked = true;
      radio.addEventListener("change", () => { chosen = radio.value; recolor(chosen); });
    }
    if (chosen) recolor(chosen);
  }

  async function refresh() {
    try {
      const answer = await fetch(location.href, { cache: "no-store" });
      if (answer.ok) {
        const next = new DOMParser().parseFromString(await answer.text(), "text/html").getElementById("report");
        const opened = [...document.querySelectorAll("details")].map((one) => one.open);
        const focused = document.activeElement && document.activeElement.name === "dimension";
        document.getElementById("report").replaceChildren(...next.childNodes);
        [...document.querySelectorAll("details")].forEach((one, at) => { if (at in opened) one.open = opened[at]; });
        prepare();
        if (focused) document.querySelector(".dimensions input:checked")?.focus({ preventScroll: true });
      } else {
        stale("The server answered " + answer.status + ".");
      }
    } catch {
      stale("`meshwright open` does not answer.");
    }
  }

  function stale(reason) {
    const time = document.getElementById("generated");
    if (time && !time.dataset.stale) {
      time.dataset.stale = "yes";
      time.after(" (not updated since: " + reason + ")");
    }
  }

  document.addEventListener("pointerover", describe);
  prepare();
  const seconds = Number(document.getElementById("report").dataset.refresh || 0);
  if (seconds) setInterval(() => { if (!document.hidden) refresh(); }, 1000 * seconds);
})();
