"use strict";
// Shows the results at other levels. Everything was computed beforehand: sliders only pick.
(() => {
  const data = JSON.parse(document.getElementById("what-if-data").textContent);
  const sliders = [...document.querySelectorAll("input[data-promise]")];
  const each = (selector, act) => document.querySelectorAll(selector).forEach(act);
  const write = (selector, texts) =>
    each(`[${selector}]`, (element) => {
      element.textContent = texts[Number(element.getAttribute(selector))];
    });

  function show() {
    const positions = sliders.map((slider) => Number(slider.value));
    const epsilons = data.promises.map((promise, k) => promise.epsilons[positions[k]]);
    // All promises together allow the safest of the settings that each allows alone.
    const setting = Math.min(
      ...data.promises.map((promise, k) => promise.settings[positions[k]]),
    );
    const numbers = data.settings[setting];

    sliders.forEach((slider, k) => slider.setAttribute("aria-valuetext", `ε = ${epsilons[k]}`));
    write("data-epsilon", epsilons);
    write("data-risk", numbers.risks);
    write("data-saved", numbers.saved);
    write("data-share", numbers.shares);
    each("[data-threshold]", (element) => {
      element.textContent = numbers.threshold;
    });
    each("[data-width]", (bar) => {
      bar.setAttribute("width", numbers.widths[Number(bar.dataset.width)]);
    });
    each("[data-what-if-setting]", (line) => {
      line.setAttribute("x1", numbers.at);
      line.setAttribute("x2", numbers.at);
    });
    data.promises.forEach((promise, k) => {
      const height = promise.heights[positions[k]];
      each(`[data-what-if-level="risk-${k}"]`, (line) => {
        line.toggleAttribute("hidden", height === null);
        line.setAttribute("y1", height ?? 0);
        line.setAttribute("y2", height ?? 0);
      });
    });
    const own = data.promises.every((promise, k) => promise.own === positions[k]);
    each("[data-own]", (element) => element.toggleAttribute("hidden", !own));
    each("[data-other]", (element) => element.toggleAttribute("hidden", own));
  }

  function reset() {
    sliders.forEach((slider, k) => {
      slider.value = data.promises[k].own;
    });
    show();
  }

  sliders.forEach((slider) => slider.addEventListener("input", show));
  document.getElementById("back").addEventListener("click", reset);
  reset(); // browsers keep a slider's place when a page is loaded again
})();
