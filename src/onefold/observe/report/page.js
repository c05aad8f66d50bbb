"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const charts = [...document.querySelectorAll(".chart")];
  const select = document.getElementById("rank");
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  const figureOf = (chart) => {
    const found = figures[chart.dataset.figure];
    return found.data ? found : found[select ? select.value : Object.keys(found)[0]] || Object.values(found)[0];
  };

  // Colours follow the page; on a narrow screen axes, legend and long names give way to the data.
  const layoutOf = (figure, width) => {
    const layout = structuredClone(figure.layout);
    const narrow = width < 520;
    layout.font = { ...layout.font, color: colour("--soft"), size: narrow ? 11 : 12 };
    layout.hoverlabel = { ...layout.hoverlabel, bgcolor: colour("--card"), bordercolor: colour("--line"), font: { color: colour("--ink") } };
    layout.legend = { ...layout.legend, font: { size: narrow ? 10 : 12 } };
    for (const axis of [layout.xaxis, layout.yaxis]) {
      Object.assign(axis, { gridcolor: colour("--grid"), linecolor: colour("--line"), tickcolor: colour("--line") });
      if (narrow && axis.type === "category") Object.assign(axis, { tickfont: { size: 10 }, ticklabelstandoff: 2 });
    }
    if (narrow) {
      layout.margin = { l: 4, r: 8, t: 8, b: 8 };
      layout.xaxis.nticks = 5;
      const names = new Set(figure.data.filter((t) => t.showlegend !== false).map((t) => t.name));
      layout.height += 9 * Math.max(0, names.size - 3);
    }
    return layout;
  };

  // A thin line of the ground's colour keeps bars that touch apart.
  const dataOf = (figure) => figure.data.map((trace) => trace.type !== "bar" ? trace
    : { ...trace, marker: { ...trace.marker, line: { width: 0.5, color: colour("--card") } } });

  const draw = (chart) => {
    const figure = figureOf(chart);
    const width = chart.clientWidth;
    const config = { displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] };
    if (width < 520) config.displayModeBar = false;
    chart.dataset.width = width;
    // react keeps the size that it drew with; resize measures the room there is now.
    return Plotly.react(chart, dataOf(figure), layoutOf(figure, width), config).then(() => Plotly.Plots.resize(chart));
  };

  const drawAll = () => Promise.all(charts.map(draw));
  dark.addEventListener("change", drawAll);
  if (select) select.addEventListener("change", drawAll);
  let resized;
  new ResizeObserver(() => {
    clearTimeout(resized);
    resized = setTimeout(() => {
      for (const chart of charts) if (chart.clientWidth !== Number(chart.dataset.width)) draw(chart);
    }, 60);
  }).observe(document.body);
  drawAll().then(() => document.documentElement.setAttribute("data-drawn", String(charts.length)));
})();
