// Lets the search start where the site is opened from a disk, as browsers start no worker from a file. The worker's
// script runs in a hidden frame instead, and this class passes the messages on. Other sites keep the browser's workers.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      frame.srcdoc =
        '<script>postMessage = data => parent.postMessage(data, "*")</' + `script><script src="${url}"></` + "script>"
      window.addEventListener("message", event => {
        if (event.source === frame.contentWindow)
          this.dispatchEvent(new MessageEvent("message", { data: event.data }))
      })
      this.loaded = new Promise(resolve => frame.addEventListener("load", resolve))
      this.frame = frame
      document.body.appendChild(frame)
    }

    postMessage(data) {
      this.loaded.then(() => this.frame.contentWindow.postMessage(data, "*"))
    }
  }
}
