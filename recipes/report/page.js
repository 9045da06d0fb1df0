// Fits the figures to the window, and lets the keyboard do what plotly leaves to a mouse.
addEventListener("load", () => {
  const narrow = matchMedia("(max-width: 48rem)"), coarse = matchMedia("(pointer: coarse)").matches;
  const live = document.getElementById("live"), buttons = ".updatemenu-button, .legendtoggle";
  const moves = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] };
  const within = (value, count) => Math.min(Math.max(value, 0), count - 1);
  for (const figure of document.querySelectorAll(".js-plotly-plot")) {
    const { cells, height, parts } = figure.layout.meta, at = [-1, 0];
    const fit = () => {
      const columns = narrow.matches || cells < 2 ? 1 : 2, rows = Math.ceil(cells / columns);
      const legend = 20 * (narrow.matches ? parts : Math.sign(parts));
      figure.parentElement.style.height = `${height || rows * 230 + legend + 100}px`;
      const grid = { "grid.rows": rows, "grid.columns": columns, "margin.b": 48 + legend };
      Plotly.relayout(figure, { dragmode: !coarse && "zoom", autosize: true, ...(height ? {} : grid) });
    };
    const move = (right, down) => {
      const shown = figure._fullData.filter((one) => one.visible === true && one.x.length > 1);
      const map = shown.find((one) => one.z);  // whose rows are moved among, not its traces
      at[1] = within(at[1] + down, map ? map.y.length : shown.length);
      const { index, meta, name, x, y, customdata, xaxis, yaxis } = map || shown[at[1]];
      const i = at[0] = within(at[0] + right, map ? x.length - 1 : x.length), row = at[1];
      const cell = { curveNumber: index, xval: map && (x[i] + x[i + 1]) / 2, yval: row };
      Plotly.Fx.hover(figure, [map ? cell : { curveNumber: index, pointNumber: i }], xaxis + yaxis);
      const words = map ? [y[row], x[i + 1], customdata[row][i][0]] : [meta, name, x[i], y[i]];
      live.textContent = words.filter((word) => word !== undefined).join(", ");
    };
    figure.addEventListener("keydown", (event) => {
      const { key, target } = event, press = target.matches(buttons) && ["Enter", " "].includes(key);
      if (press || moves[key]) event.preventDefault();
      if (moves[key]) move(...moves[key]);
      for (const name of press ? ["mousedown", "mouseup", "click"] : [])
        target.dispatchEvent(new MouseEvent(name, { bubbles: true }));
    });
    figure.tabIndex = 0;
    const reach = () => figure.querySelectorAll(buttons).forEach((one) => (one.tabIndex = 0));
    figure.on("plotly_afterplot", reach);
    narrow.addEventListener("change", fit);
    fit();
  }
});
