// Fits the charts to the window, and lets the keyboard do what plotly leaves to a mouse.
addEventListener("load", () => {
  const narrow = matchMedia("(max-width: 48rem)"), coarse = matchMedia("(pointer: coarse)").matches;
  const live = document.getElementById("live"), buttons = ".updatemenu-button, .legendtoggle";
  const moves = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] };
  const within = (value, count) => Math.min(Math.max(value, 0), count - 1);
  const figure = document.getElementById("curves"), at = [-1, 0];
  const fit = () => {
    const { cells } = figure.layout.meta, columns = narrow.matches || cells < 2 ? 1 : 2;
    const rows = Math.ceil(cells / columns), grid = { "grid.rows": rows, "grid.columns": columns };
    figure.parentElement.style.height = `${rows * 230 + 120}px`;
    Plotly.relayout(figure, { dragmode: !coarse && "zoom", autosize: true, ...grid });
  };
  const move = (right, down) => {
    const shown = figure._fullData.filter((one) => one.visible === true && one.meta);
    at[1] = within(at[1] + down, shown.length);
    const { index, meta, name, x, y, xaxis, yaxis } = shown[at[1]];
    const point = at[0] = within(at[0] + right, x.length);
    Plotly.Fx.hover(figure, [{ curveNumber: index, pointNumber: point }], xaxis + yaxis);
    live.textContent = [meta, name, x[point], y[point]].join(", ");
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
});
