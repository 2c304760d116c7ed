"""Plain words that prompts are made of: most are one token of any vocabulary."""

_TEXT = """
air all and animal answer apple arm ask back ball bank bear bed bell bird black blue boat body book box boy bread
bridge bring brother build busy button call camp car card care carry cat chair change child city class clean clear
clock close cloud coat cold color come cook corn count country cover cow cross cry cup cut dance dark day deep desk
dog door down draw dream dress drink drive drop dry dust ear earth east eat edge egg empty end engine even evening
eye face fall family far farm fast father feel field fight find fire fish flag floor flower fly food foot forest
form free friend fruit full game garden gate gift girl give glass gold good grass gray great green ground group
grow hair half hand happy hard hat head hear heart heat heavy help high hill hold home hope horse hot hour house
ice idea iron island jump keep key kind king kitchen know lake lamp land large last laugh law lead leaf learn leg
letter life light line lion list live long lose loud love low lunch machine make man map mark market milk mind
mine money month moon morning mother mountain mouth move music name near neck need nest new night north nose note
number ocean office oil old open orange order page paint paper park part party pass past pay pen people picture
piece place plan plant play point poor port power press price pull push queen question quick quiet rain read red
rest rice rich ride right ring river road rock roof room root rope round rule run sail salt sand save school sea
seat see seed sell send set shape share sharp sheep ship shirt shoe shop short show side sign silver sing sister
sit skin sky sleep slow small smell smile snow soap soft son song sound south space speak spring stand star start
stay step stone stop store storm story street strong sugar summer sun sweet swim table tail take talk tall taste
teach team tell ten test thank think time tooth top touch town toy train travel tree trip true turn uncle under
unit value view village visit voice wait walk wall war warm wash watch water wave way wear week west wheel white
wide wild wind window wine winter wise wish wolf woman wonder wood word work world write yard year yellow young
"""
WORDS = tuple(_TEXT.split())
