//! `pleach devices`: lists the devices of this machine that can move tensors.

use std::fmt::Write;
use std::net::IpAddr;

use serde_json::{Value, json};

use super::CommandError;
use super::doctor::Machine;
use super::doctor::network::{Interface, interfaces};
use super::output::{print, print_json};

/// Arguments of `pleach devices`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  pleach devices\n  pleach devices --json | jq .rdma\n\n\
    'pleach doctor' checks these devices.")]
pub(crate) struct Arguments {
    /// Print the list as one JSON object
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
struct Devices {
    memory: Option<String>,
    interfaces: Vec<Interface>,
    rdma: Vec<RdmaPort>,
    /// The port that ranks would take, or why none.
    chosen: Result<String, String>,
    gpus: Vec<Gpu>,
}

/// Runs `pleach devices`.
pub(crate) fn run(arguments: &Arguments) -> Result<(), CommandError> {
    let found = Devices::of(&Machine::here());
    if arguments.json { print_json("devices", &found.json()) } else { print("devices", &found.text()) }
}

impl Devices {
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

    fn json(&self) -> Value {
        let interface = |it: &Interface| {
            json!({
                "name": it.name, "up": it.is_up, "megabits_per_s": it.megabits_per_s, "mtu": it.mtu,
                "numa": it.numa, "addresses": it.addresses
            })
        };
        let gid = |(index, address, kind, interface): &(u32, String, String, Option<String>)| json!({ "index": index, "address": address, "kind": kind, "interface": interface });
        let port = |it: &RdmaPort| {
            json!({
                "device": it.device, "port": it.number, "up": it.is_active, "rate": it.rate,
                "link_layer": it.layer, "path_mtu_bytes": it.path_mtu_bytes, "numa": it.numa,
                "gids": it.gids.iter().map(gid).collect::<Vec<_>>()
            })
        };
        let gpu = |it: &Gpu| json!({ "pci": it.address, "numa": it.numa, "model": it.model });
        let (Ok(reason) | Err(reason)) = &self.chosen;
        json!({
            "shm": self.memory,
            "tcp": self.interfaces.iter().map(interface).collect::<Vec<_>>(),
            "rdma": self.rdma.iter().map(port).collect::<Vec<_>>(),
            "verbs": { "usable": self.chosen.is_ok(), "reason": reason },
            "gpus": self.gpus.iter().map(gpu).collect::<Vec<_>>()
        })
    }
}
