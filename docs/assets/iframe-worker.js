// Browsers start no workers for pages opened from a folder (file://), and the search runs in a worker. There, a hidden frame
// takes its place: it loads the worker's script and passes messages on.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.appendChild(frame);
      const inside = frame.contentWindow;
      const answer = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inside.document.open();
      inside.document.write(`<!doctype html><script src="${url}"><\/script>`);
      inside.postMessage = answer;
      inside.importScripts = (...urls) =>
        urls.reduce((before, src) => before.then(() => new Promise((done, failed) => {
          const script = inside.document.createElement("script");
          Object.assign(script, { src, onload: done, onerror: failed });
          inside.document.head.appendChild(script);
        })), Promise.resolve());
      inside.document.close();
      frame.onload = () => {
        this.receive = (data) => inside.dispatchEvent(new MessageEvent("message", { data }));
        this.waiting.splice(0).forEach(this.receive);
      };
    }
    postMessage(data) {
      this.receive ? this.receive(data) : this.waiting.push(data);
    }
    terminate() {}
  };
  window.Worker = window.IFrameWorker;
}
