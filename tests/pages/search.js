// Searches a built site as its pages do from a disk: node search.js SITE QUERY... prints {query: [location, ...]}.
// The page's shim starts the search's worker in a frame. Here the frame is another context of node.
const fs = require("fs")
const path = require("path")
const vm = require("vm")

const [site, ...queries] = process.argv.slice(2)
const workers = path.join(site, "assets/javascripts/workers")
const script = path.join(workers, fs.readdirSync(workers).find(name => /^search\..*\.js$/.test(name)))

class Frame extends EventTarget {
  // What a browser does with a frame: it runs the scripts of `srcdoc`, and both windows get each other's messages
  run() {
    const listeners = []
    const child = vm.createContext({ console })
    child.self = child
    child.parent = { postMessage: data => page.receive(this.contentWindow, data) }
    child.addEventListener = (kind, listener) => listeners.push(listener)
    this.contentWindow = { postMessage: data => listeners.forEach(listener => listener({ data })) }
    for (const [, src, text] of this.srcdoc.matchAll(/<script(?: src="([^"]*)")?>(.*?)<\/script>/g))
      vm.runInContext(src ? fs.readFileSync(src, "utf8") : text, child)
    this.dispatchEvent(new Event("load"))
  }
}

const listeners = []
const page = { EventTarget, MessageEvent, Promise, location: { protocol: "file:" } }
page.receive = (source, data) => listeners.forEach(listener => listener({ source, data }))
page.window = page
page.addEventListener = (kind, listener) => listeners.push(listener)
page.document = { createElement: () => new Frame(), body: { appendChild: frame => setTimeout(() => frame.run()) } }
vm.createContext(page)
vm.runInContext(fs.readFileSync(path.join(site, "iframe-worker.js"), "utf8"), page)
vm.runInContext(fs.readFileSync(path.join(site, "search/search_index.js"), "utf8"), page)

const worker = new page.Worker(script)
const answer = message =>
  new Promise(resolve => {
    worker.addEventListener("message", event => resolve(event.data), { once: true })
    worker.postMessage(message)
  })

async function main() {
  const { config, docs } = page.__index
  await answer({ type: 0, data: { config, docs, options: { suggest: false } } })
  const found = {}
  for (const query of queries) {
    const { data } = await answer({ type: 2, data: query })
    found[query] = data.items.flat().filter(item => item.score > 0).map(item => item.location)
  }
  console.log(JSON.stringify(found))
}

main()
