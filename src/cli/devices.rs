//! `pleach devices`: what tensors can be moved by here.

use std::fmt::Write;
use std::net::IpAddr;

use super::CommandError;
use super::doctor::Machine;
use super::doctor::network::{Interface, interfaces};
use super::output::{list, print, quoted};

/// Arguments of `pleach devices`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  pleach devices\n  pleach devices --json | jq .rdma\n\n\
    'pleach doctor' says what is wrong with them.")]
pub(crate) struct Arguments {
    /// Print all as one JSON object
    #[arg(long)]
    json: bool,
}

/// An RDMA port with its addresses.
struct RdmaPort {
    device: String,
    number: u8,
    is_active: bool,
    rate: Option<String>,
    layer: Option<String>,
    path_mtu_bytes: Option<u32>,
    numa: Option<u64>,
    /// Index, address, kind, interface.
    gids: Vec<(u32, String, String, Option<String>)>,
}

/// A GPU.
struct Gpu {
    address: String,
    numa: Option<u64>,
    model: Option<String>,
}

/// All that can be used.
struct Found {
    memory: Option<String>,
    interfaces: Vec<Interface>,
    rdma: Vec<RdmaPort>,
    /// The port that ranks would take, or why none.
    chosen: Result<String, String>,
    gpus: Vec<Gpu>,
}

/// Runs `pleach devices`.
pub(crate) fn run(arguments: &Arguments) -> Result<(), CommandError> {
    let found = Found::of(&Machine::here());
    print("devices", &if arguments.json { found.json() } else { found.text() })
}

impl Found {
    fn of(machine: &Machine) -> Self {
        let rdma = machine.rdma();
        Self {
            memory: machine.memory(),
            interfaces: interfaces(machine),
            chosen: rdma.chosen,
            rdma: rdma
                .ports
                .into_iter()
                .map(|(port, facts)| RdmaPort {
                    gids: port
                        .gids
                        .iter()
                        .map(|gid| {
                            let address = IpAddr::V6(gid.address).to_canonical().to_string();
                            (gid.index, address, gid.kind.to_string(), gid.interface.clone())
                        })
                        .collect(),
                    device: port.device,
                    number: port.number,
                    is_active: port.is_active,
                    rate: facts.rate,
                    layer: facts.layer,
                    path_mtu_bytes: facts.path_mtu_bytes,
                    numa: facts.numa,
                })
                .collect(),
            gpus: machine
                .gpus_described()
                .into_iter()
                .map(|(address, numa, model)| Gpu { address, numa, model })
                .collect(),
        }
    }

    fn text(&self) -> String {
        let known = |number: Option<u64>| number.map_or_else(|| "-".to_owned(), |number| number.to_string());
        let mut out = String::new();
        // Writing into a `String` does not fail.
        let memory = self.memory.as_deref().unwrap_or("memory unknown");
        let _ = writeln!(out, "shm    this host, {memory}");
        for interface in &self.interfaces {
            let state = if interface.is_up { "up" } else { "down" };
            let _ = writeln!(
                out,
                "tcp    {:<12} {state:<6} {:<16} MTU {:<6} node {:<3} {}",
                interface.name,
                interface.speed(),
                known(interface.mtu),
                known(interface.numa),
                interface.addresses.join(" ")
            );
        }
        for port in &self.rdma {
            let state = if port.is_active { "up" } else { "down" };
            let name = format!("{}:{}", port.device, port.number);
            let _ = writeln!(
                out,
                "verbs  {name:<12} {state:<6} {:<16} MTU {:<6} node {:<3} {}",
                port.rate.as_deref().unwrap_or("rate unknown").split(" (").next().unwrap_or_default(),
                known(port.path_mtu_bytes.map(u64::from)),
                known(port.numa),
                port.layer.as_deref().unwrap_or("link layer unknown"),
            );
            for (index, address, kind, interface) in &port.gids {
                let interface = interface.as_deref().unwrap_or("-");
                let _ = writeln!(out, "         GID {index:<4} {address} ({kind}, {interface})");
            }
        }
        match &self.chosen {
            Ok(reason) => {
                let _ = writeln!(out, "       ranks take {reason}");
            }
            Err(reason) => {
                let _ = writeln!(out, "verbs  none: {reason}");
            }
        }
        for (number, gpu) in self.gpus.iter().enumerate() {
            let model = gpu.model.as_deref().unwrap_or("model unknown");
            let _ =
                writeln!(out, "cuda   {number:<12} {:<16} node {:<3} {model}", gpu.address, known(gpu.numa));
        }
        if self.gpus.is_empty() {
            out.push_str("cuda   none: no NVIDIA GPU on this machine\n");
        }
        out
    }

    fn json(&self) -> String {
        let number =
            |number: Option<u64>| number.map_or_else(|| "null".to_owned(), |number| number.to_string());
        let text = |text: Option<&str>| text.map_or_else(|| "null".to_owned(), quoted);
        let interface = |it: &Interface| {
            format!(
                "{{\"name\":{},\"up\":{},\"megabits_per_s\":{},\"mtu\":{},\"numa\":{},\"addresses\":{}}}",
                quoted(&it.name),
                it.is_up,
                number(it.megabits_per_s),
                number(it.mtu),
                number(it.numa),
                list(it.addresses.iter().map(|address| quoted(address)))
            )
        };
        let gid = |(index, address, kind, interface): &(u32, String, String, Option<String>)| {
            format!(
                "{{\"index\":{index},\"address\":{},\"kind\":{},\"interface\":{}}}",
                quoted(address),
                quoted(kind),
                text(interface.as_deref())
            )
        };
        let port = |it: &RdmaPort| {
            format!(
                "{{\"device\":{},\"port\":{},\"up\":{},\"rate\":{},\"link_layer\":{},\"path_mtu_bytes\":{},\"numa\":{},\"gids\":{}}}",
                quoted(&it.device),
                it.number,
                it.is_active,
                text(it.rate.as_deref()),
                text(it.layer.as_deref()),
                number(it.path_mtu_bytes.map(u64::from)),
                number(it.numa),
                list(it.gids.iter().map(gid))
            )
        };
        let gpu = |it: &Gpu| {
            format!(
                "{{\"pci\":{},\"numa\":{},\"model\":{}}}",
                quoted(&it.address),
                number(it.numa),
                text(it.model.as_deref())
            )
        };
        let (taken, reason) = match &self.chosen {
            Ok(reason) => ("true", reason),
            Err(reason) => ("false", reason),
        };
        format!(
            "{{\"shm\":{},\"tcp\":{},\"rdma\":{},\"verbs\":{{\"usable\":{taken},\"reason\":{}}},\"gpus\":{}}}\n",
            text(self.memory.as_deref()),
            list(self.interfaces.iter().map(interface)),
            list(self.rdma.iter().map(port)),
            quoted(reason),
            list(self.gpus.iter().map(gpu))
        )
    }
}
